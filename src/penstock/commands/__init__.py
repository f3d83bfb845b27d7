"""What the command line can do, one file for each kind of thing; `penstock.cli` puts them together."""

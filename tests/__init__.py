"""The tests. Folders are those of src/penstock; support/ has what is no test."""

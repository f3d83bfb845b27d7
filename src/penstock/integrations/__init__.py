"""Models of other libraries over pipeline stages. Each module needs the library it is named after."""

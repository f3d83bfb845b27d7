"""Penstock inside other libraries' loops. Each module needs the library it is named after."""

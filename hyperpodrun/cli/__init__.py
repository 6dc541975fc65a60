"""The command line: what users type. It stands apart from the library that training code imports."""

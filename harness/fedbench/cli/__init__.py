"""The command line, one verb a file. Importing it is cheap; each command imports what it needs when it runs."""

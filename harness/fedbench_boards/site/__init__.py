"""One static site of all result folders: suites, methods and data sets, as pages that need no server and no network."""

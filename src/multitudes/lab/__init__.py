"""The application: data sets, studies, reports, the server and the command line. The library never imports it.

Imports all other packages but `sklearn`. `data` reads and prepares data, `study` trains and compares methods on it,
`report` writes the page of a study, `serve` answers over HTTP, and `cli` is the program `multitudes`.
"""

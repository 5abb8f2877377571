"""Serve a trained network over HTTP: `multitudes serve` predicts rows, images and texts, and has a page to try it.

Imports the library, `lab.data`, `lab.study` and `lab.report`. `http_app.py` has the routes, `requests.py` parses bodies
into inputs, `batching.py` combines concurrent requests, `served_network.py` predicts, and `json_answers.py` formats the
answers.
"""

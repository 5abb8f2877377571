"""Serve a trained network over HTTP: `multitudes serve` predicts rows, images and texts, and has a page to try it.

Imports core, data, evaluation, deployment, study and report. A request goes from `app.py` through `requests.py` (bytes
to inputs, or a refusal) and `batching.py` (concurrent requests form one batch) to `network.py`, and back through
`answers.py`. To change request bodies edit `requests.py`; answers, `answers.py`; the page, `templates/`.
"""

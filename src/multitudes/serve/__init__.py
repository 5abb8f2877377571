"""A trained network behind HTTP: `multitudes serve` answers rows, images and texts, and shows a page to try it on.

Imports core, data, evaluation, deployment, study and report. A request goes from `app.py` through `requests.py` (bytes
into inputs, or a refusal) and `batching.py` (requests that come together are one batch) to `network.py`, and back
through `answers.py`. What a body may look like is changed in `requests.py`, what an answer holds in `answers.py`, the
page in `templates/`.
"""

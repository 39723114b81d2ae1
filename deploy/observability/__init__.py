"""Dashboards, recording rules and alerts of KVBraid, as code.

`python -m deploy.observability` writes deploy/helm/kvbraid/files/{dashboards,alerts} and
deploy/observability/prometheus; a test compares them with what is committed.
"""

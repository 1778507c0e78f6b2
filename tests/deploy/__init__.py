"""Tests of ``deploy/k8s``."""

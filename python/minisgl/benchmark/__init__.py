"""Workloads and measuring code that the scripts in benchmark/ share."""

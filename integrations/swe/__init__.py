"""Software engineering tasks: a repository, its tests, and a reward that comes from them."""

from belayer_integrations.swe.records import SweRecord, load_records
from belayer_integrations.swe.tasks import repository_task, swe_task

__all__ = ["SweRecord", "load_records", "repository_task", "swe_task"]

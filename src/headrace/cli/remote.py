"""Plans of models that are still on the hub."""

from typing import TYPE_CHECKING

from headrace.config import EngineConfig

if TYPE_CHECKING:
    from headrace.hub import Repository
    from headrace.plan import MemoryPlan


def plan_remote(
    repository: "Repository", engine: EngineConfig, *, is_speed_wanted: bool = True
) -> "MemoryPlan":
    """Plan a repository's model by its headers.

    Where its speed would follow from a drive that nobody has measured, the drive is measured with a
    scratch file, as long as that can be written.

    Raises:
        CheckpointError, ConfigError, UnsupportedModelError, MemoryBudgetError: as `plan_model`.
    """
    import sys

    from headrace.cli.report import byte_progress
    from headrace.disk_bench import measure_drive
    from headrace.errors import CheckpointError, ConfigError
    from headrace.llm import plan_model
    from headrace.pull import remote_headers

    with remote_headers(repository) as path:
        plan = plan_model(path, engine)
        if plan.is_resident or plan.drive_bytes_per_s is not None or not is_speed_wanted:
            return plan
        record_bytes = plan.cold_bytes_per_token // plan.working_set_records
        try:
            with byte_progress(sys.stderr.isatty()) as show:
                found = measure_drive(path.parent, record_bytes, show)
        except (CheckpointError, ConfigError):  # the plan says that nobody has measured
            return plan
        return plan if found is None else plan_model(path, engine)

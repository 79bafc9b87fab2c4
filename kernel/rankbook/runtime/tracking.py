"""Metrics sent to trackers, as methods of the `Accelerator`.

Owns: which trackers run. Refuses: to know any destination; `trackers.py` does.
"""

from __future__ import annotations

from typing import Any

from rankbook.errors import BadRequest
from rankbook.runtime.settings import Core
from rankbook.runtime.trackers import GeneralTracker, make_tracker


class Tracking(Core):
    """See `Accelerator`."""

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        """Start every tracker of `log_with` for a run called `project_name`; earlier ones end first.

        `config` are the run's settings. `init_kwargs` maps a tracker's name to what it is made with.
        """
        self.end_training()
        for each in self.log_with:
            options = (init_kwargs or {}).get(each if isinstance(each, str) else each.name, {})
            tracker = make_tracker(each, project_name, self.logging_dir, **options)
            tracker.start()
            self.trackers.append(tracker)
            if config is not None:
                tracker.store_init_configuration(config)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:  # noqa: ANN401 - a tracker, or its own object
        """The tracker that is called `name`; on ranks without one, a tracker that does nothing.

        Raises `BadRequest` for a name that none of `log_with` has.
        """
        for each in self.trackers:
            if each.name == name:
                return each.tracker if unwrap else each
        known = [each if isinstance(each, str) else each.name for each in self.log_with]
        if name in known and not self.is_main_process:
            return GeneralTracker(_blank=True)
        raise BadRequest(f"no tracker {name!r} runs; init_trackers starts {known or 'those that log_with names'}")

    def log(
        self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, dict[str, Any]] | None = None
    ) -> None:
        """Send `values` to every tracker. `log_kwargs` maps a tracker's name to further arguments."""
        for each in self.trackers:
            each.log(values, step=step, **(log_kwargs or {}).get(each.name, {}))

    def end_training(self) -> None:
        """End every tracker."""
        while self.trackers:
            self.trackers.pop().finish()

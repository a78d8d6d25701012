"""A progress bar: frames, frames per second, episodes and return."""

from __future__ import annotations

from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["Bar"]


class Bar:
    """Shows how far a collection is; starts with the first update."""

    def __init__(self, total_frames: int) -> None:
        self._total = None if total_frames == -1 else total_frames
        self._progress: Progress | None = None

    def update(self, stats: dict[str, Any], *, done: bool = False) -> None:
        """Show these statistics."""
        if self._progress is None:
            self._progress = Progress(
                TextColumn("[bold]collecting"),
                BarColumn(),
                TextColumn("{task.completed:,} frames"),
                TextColumn("{task.fields[text]}"),
                TimeRemainingColumn(),
            )
            self._progress.start()
            self._task = self._progress.add_task("", total=self._total, text="")
        text = f"{stats['frames_per_second']:,.0f}/s  {stats['episodes']:,} episodes"
        if stats["return"] is not None:
            text += f"  return {stats['return']['last_100']:.1f}"
        shown = stats["frames"] if self._total is None else min(stats["frames"], self._total)
        self._progress.update(self._task, completed=shown, text=text)
        if done:
            self.close()

    def close(self) -> None:
        """Leave the bar as it is and give the terminal back."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

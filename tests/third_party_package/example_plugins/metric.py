"""A metric: F1 over the classes of the tail."""

from fedbench.api import Metric, MetricTask, NoParams


class TailF1(Metric[NoParams]):
    """Mean F1 of the tail's classes, in percent."""

    name = "example_tail_f1"

    def values(self, task: MetricTask) -> float | None:
        """None where the scenario has no tail."""
        scores = []
        for label in task.groups.get("tail", ()):
            hits = int((task.right & (task.labels == label)).sum())
            either = int((task.predicted == label).sum()) + int((task.labels == label).sum())
            scores.append(2 * hits / either if either else 0.0)
        return 100 * sum(scores) / len(scores) if scores else None

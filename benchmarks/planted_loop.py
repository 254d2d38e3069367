"""A loop whose steps take as long as its task says (`task.planted.step_s(samples)`), on a fake clock."""

from collections.abc import Callable
from typing import Any

from jaxgoodput.train.loop import Loop
from jaxgoodput.tune.tuner import TunerAnswer, TunerThread, answer
from jaxgoodput.tune.verdict import Situation


class AtOnce(TunerThread):
    """A tuner whose answer is there before the next step: thinking takes no planted time."""

    def __init__(self, on_answer: Callable[[TunerAnswer], None], on_error: Any):
        self._on_answer = on_answer

    @property
    def is_busy(self) -> bool:
        return False

    def ask(self, situation: Situation) -> bool:
        self._on_answer(answer(situation))
        return True

    def close(self) -> None:
        pass


class PlantedLoop(Loop):
    """A loop whose steps take as long as the problem says; its clock stands still otherwise."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs, tuner=AtOnce)

    def _read(self, metrics, count):
        found = super()._read(metrics, count)
        task: Any = self.task
        for metrics, _ in found:
            self.clock.sleep(task.planted.step_s(int(metrics.num_samples)))
        return found

    def _on_result(self, result):
        super()._on_result(result)
        self.analyst.flush()

"""What is due by time or progress: checkpoints and evaluations."""

from jaxgoodput.train.config import Config


class Due:
    """Remembers when each was last asked for."""

    def __init__(self, config: Config, now_s: float, progress: float):
        self._config = config
        self._save_s = self._evaluate_s = now_s
        self._progress = progress

    def asked(self, now_s: float, progress: float | None) -> dict[str, bool]:
        """The wishes of this moment, as `Requests.post` takes them; `progress` None: not known yet."""
        config, wishes = self._config, {}
        if now_s - self._save_s >= config.checkpoint_every_s:
            self._save_s = now_s
            wishes["save"] = True
        if config.eval_every_s and now_s - self._evaluate_s >= config.eval_every_s:
            self._evaluate_s = now_s
            wishes["evaluate"] = True
        every = config.eval_every_base_steps
        if every and progress and progress - self._progress >= every:
            self._progress = progress
            wishes["evaluate"] = True
        return wishes

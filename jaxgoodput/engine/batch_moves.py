"""`BatchMoves`: moving a batch that has begun from one layout to another, in memory."""

import dataclasses
import itertools
from collections.abc import Sequence

from jaxgoodput.engine.compiled import Moves, ProgramCache
from jaxgoodput.engine.programs.families import Programs
from jaxgoodput.engine.state import Work, delete
from jaxgoodput.parallel.move import Move


class BatchMoves:
    """Moves `Work` between the layouts of one problem; `moves` builds the moves of its parts."""

    def __init__(self, compiled: ProgramCache, moves: Moves):
        self._compiled = compiled
        self._moves = moves

    def compile(self, home: Programs, others: Sequence[Programs]) -> None:
        """Plan and compile what batches need that begin under `home` and go through `others` in any order."""
        for old, new in itertools.permutations((home, *others), 2):
            # If the masters serve as compute parameters, the state owns them until a batch has moved.
            for donate in {True, home.problem.compute_dtype is not None or old is not home}:
                self._compiled(self._moves.work, old, new, donate=donate)
            self._compiled(self._moves.fixed, old, new)
            self._compiled(self._moves.sums, old, new)

    def sums(self, old: Programs, new: Programs) -> Move:
        """Return the move of reduced sums, which deletes its source."""
        return self._compiled(self._moves.sums, old, new)

    def __call__(self, work: Work, old: Programs, new: Programs) -> Work:
        """Return the batch under `new`, with its gradients reduced under `old`; the old one is consumed.

        Raises MoveDoesNotFit, and leaves the batch as it was, if a device has too little memory.
        """
        move = self._compiled(self._moves.work, old, new, donate=work.owns_params)
        fixed = self._compiled(self._moves.fixed, old, new)
        move_sums = self._compiled(self._moves.sums, old, new)
        for one in (move, fixed, move_sums):
            one.require_room()
        sums = None
        if work.sums is not None:
            reduced = old.reduced(self._compiled, work.sums)
            if reduced is not work.sums:
                delete(work.sums)
            sums = new.in_parts(self._compiled, move_sums(reduced))
        params, scale = move((work.params, work.scale))
        model_state, key, step = fixed((work.model_state, work.key, work.step))
        return dataclasses.replace(
            work,
            layout=new.layout,
            owns_params=True,
            params=params,
            scale=scale,
            model_state=model_state,
            key=key,
            step=step,
            sums=sums,
        )

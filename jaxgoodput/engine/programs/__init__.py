"""The programs of an engine: for each, a pure function, what it donates, and abstract arguments.

`accumulate` adds a micro-batch; `step` is the fused step of one micro-batch, with or without a noise sample;
`step_after` fuses the last of several micro-batches with the update. These are made for micro-batches of one
shape. Independent of a shape are `init`, `begin`, `zeros` (a throw-away state), `reduce`, `spread` (reduced
sums back in partial form) and `update`.

A loss runs in one of two ways. *separate* (`SeparatePrograms`): every replica holds the whole model and
computes its own gradient, so `accumulate` needs no collective, and in a batch of one micro-batch every
replica is a noise group. *global* (`GlobalPrograms`): the loss of all rows of a micro-batch runs under plain
`jit` with the mesh set. The compiler partitions it as the parameters and the model's own constraints say. A
micro-batch is then one noise group; to measure noise, a step also takes the gradient of a part of its rows.
The update sees whole values in both.

`Engines` chooses the family once for each layout. An engine then asks its programs what differs between
families: what to compile, how to reduce, what to hand to a program besides the batch.
"""

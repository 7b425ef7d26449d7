"""The run/ package configures a run, starts its processes, records its results and ends the run.

Read `keys.py` first, because it defines every configuration key. `config.py` reads and checks the keys of a run. Then
read `start.py` and `launch.py`, which start and end the processes. `early.py` starts some of the processes before
train.py imports torch. `memory.py` estimates the memory and the disk space that a run needs. `recover.py` restores a
killed run. `schedule.py` records which policy version computed each token, and which step consumed each group.
`replay.py` repeats a run from the record of `schedule.py`. `logger.py`, `failures.py`, `doctor.py`, `report.py`,
`summary.py` and `evaluate.py` report results. With `chat.py` a user talks to the trained model.

The proxy and the small inference server use `serve.py` and `fields.py`. `leash.py` starts SGLang, and ends SGLang when
the process of train.py ends.

The modules of run/ may import from every other package of the project. The other packages may import only `keys.py`,
`fields.py` and `serve.py` from run/. The module proxy.py may import `keys.py`, `fields.py`, `serve.py` and
`schedule.py`.
"""

"""The run/ package configures a run, starts its processes, records its results and ends the run.

Read keys.py first. keys.py defines every configuration key. config.py reads and checks the keys of a run. Then read
start.py and launch.py, which start and end the processes, and early.py, which starts some of the processes before
train.py imports torch. memory.py estimates what a run needs. recover.py restores a killed run. schedule.py records
which version computed which tokens and which step consumed which groups, and replay.py repeats a run from this record.
logger.py, failures.py, doctor.py, report.py, summary.py and evaluate.py report results. chat.py talks to the trained
model. The proxy and the small inference server use serve.py and fields.py. leash.py starts SGLang, and ends it when
train.py dies. The modules of run/ may import from every other package of the project. The other packages may import
only keys.py, fields.py and serve.py from run/. proxy.py may also import schedule.py.
"""

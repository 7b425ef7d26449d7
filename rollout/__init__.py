"""The rollout side decides which episodes run, and makes batches of their results.

Read dispatcher.py first. It decides which prompt groups start and which a training step consumes. Then read
executor.py. Its `prepare_batch` connects the dataloader, the workflows and the dispatcher. rows.py makes one row of a
conversation's turns, and trajectory.py defines the tensors of a batch. runner.py holds the thread in which episodes
run. reward.py and workers.py run the user's code in processes. Modules of this folder may import the staleness gate,
the workflows, the conversation tree, the records of a request and the configuration.
"""

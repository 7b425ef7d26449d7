"""The rollout side: which episodes run, and how they become a batch.

Read dispatcher.py first (which prompt groups start, and which are consumed), then executor.py, which joins the
dataloader, the workflows and the dispatcher into `prepare_batch`. trajectory.py defines the tensors of a batch.
runner.py holds the thread in which episodes run. reward.py and workers.py run the user's code in processes. This room
may import the staleness gate, the workflows, the conversation tree, the records of a request and the configuration.
"""

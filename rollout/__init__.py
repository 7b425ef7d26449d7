"""The modules in rollout/ decide which episodes run, and turn the results of the episodes into batches.

Read dispatcher.py first. The dispatcher decides which prompt groups start and which groups a training step consumes.
Then read executor.py. The executor's method `prepare_batch` connects the dataloader, the workflows and the dispatcher.
The module rows.py makes one row from the turns of a conversation, and trajectory.py defines the tensors of a batch. The
module runner.py holds the thread in which episodes run. The modules reward.py and workers.py run the user's code in
processes. Modules of this folder may import the staleness gate, the workflows, the conversation tree, the records of a
request and the configuration.
"""

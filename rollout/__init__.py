"""The modules in rollout/ decide which episodes run, and turn the results of the episodes into batches.

Read dispatcher.py first. The dispatcher decides which prompt groups start and which groups a training step consumes.
Then read executor.py. The executor's method `prepare_batch` connects the dataloader, the workflows and the dispatcher.
The module rows.py makes one row from the turns of a conversation, and trajectory.py defines the tensors of a batch. The
module runner.py runs all episodes in one thread. The modules reward.py and workers.py run the user's code in separate
processes. The table in docs/structure.md shows which imports are allowed in rollout/.
"""

"""Who runs next: requests, sequences, queues, policies, the scheduler. Imports nothing below the base but kvcache."""

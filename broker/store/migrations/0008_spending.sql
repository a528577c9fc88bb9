-- Reports of spending ask for a window of time.

SET LOCAL statement_timeout = '60s';

-- The runner needs a transaction, and brokers start after it.
-- squawk-ignore require-concurrent-index-creation
CREATE INDEX ledger_at ON ledger (at) WHERE kind IN ('charge', 'adjustment');

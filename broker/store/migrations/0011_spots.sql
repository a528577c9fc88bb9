-- Each broker adds up the spot machines of the last 30 days every 10 minutes.

SET LOCAL statement_timeout = '60s';

-- The runner needs a transaction, and brokers start after it.
-- squawk-ignore require-concurrent-index-creation
CREATE INDEX attempts_spot ON attempts (create_sent_at) WHERE (line -> 'offer' ->> 'spot')::boolean;

-- An index of the attempts that billing, the spend guard and the grants read every round: not those still planned.
-- squawk-ignore-file require-concurrent-index-creation
-- The runner applies a file in one transaction. Writes wait until the index is made.
SET LOCAL statement_timeout = '60s';

CREATE INDEX attempts_sent ON attempts (job_id) WHERE lane IS NOT NULL AND create_sent_at IS NOT NULL;

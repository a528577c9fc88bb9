-- Preempted attempts in a row that saved no new checkpoint: they have a bound of their own, apart from the retries.
SET LOCAL statement_timeout = '60s';
ALTER TABLE jobs ADD COLUMN preemptions_without_progress bigint NOT NULL DEFAULT 0;
-- Not validated, because all rows hold the default: no scan blocks the table. New values are checked.
ALTER TABLE jobs ADD CONSTRAINT jobs_preemptions CHECK (preemptions_without_progress >= 0) NOT VALID;

-- Preempted attempts in a row that saved no new checkpoint: they have a bound of their own, apart from the retries.
ALTER TABLE jobs ADD COLUMN preemptions_without_progress bigint NOT NULL DEFAULT 0;
ALTER TABLE jobs ADD CONSTRAINT jobs_preemptions CHECK (preemptions_without_progress >= 0);

-- Indexes for lists of jobs and of audit entries, newest first, and the labels of jobs in a table of their own.
-- squawk-ignore-file require-concurrent-index-creation
-- The runner applies a file in one transaction. Writes wait until the indexes are made.
SET LOCAL statement_timeout = '60s';

-- Operators list all teams, and row-level security turns the team of the others into a filter.
CREATE INDEX jobs_newest ON jobs (created_at, id);
CREATE INDEX jobs_of_owner ON jobs (owner, created_at, id);
CREATE INDEX audit_newest ON audit (at, id);

-- An index on the labels within the spec would not serve the API. Below row-level security only leakproof operators may
-- use an index; the operators of jsonb are not leakproof, and equality of text is.
CREATE TABLE job_labels (
    job_id text NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    team text NOT NULL,
    -- key:value; a key has no colon
    label text COLLATE "C" NOT NULL,
    -- equal to the created_at of the job
    created_at timestamptz NOT NULL,
    PRIMARY KEY (job_id, label)
);
CREATE INDEX job_labels_listed ON job_labels (label, created_at, job_id);

-- The labels of a job never change after its submission.
CREATE FUNCTION write_job_labels() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO job_labels (job_id, team, label, created_at)
    SELECT NEW.id, NEW.team, entry.key || ':' || entry.value, NEW.created_at
    FROM jsonb_each_text(NEW.spec -> 'labels') AS entry;
    RETURN NULL;
END $$;
CREATE TRIGGER job_labels_written AFTER INSERT ON jobs
    FOR EACH ROW WHEN (NEW.spec -> 'labels' <> '{}') EXECUTE FUNCTION write_job_labels();

INSERT INTO job_labels (job_id, team, label, created_at)
SELECT jobs.id, jobs.team, entry.key || ':' || entry.value, jobs.created_at
FROM jobs, jsonb_each_text(jobs.spec -> 'labels') AS entry;

CALL gpubroker_protect('job_labels', 'SELECT, INSERT');

-- More machines under an attempt's name than were bought bill as well, until they are destroyed.
-- squawk-ignore-file constraint-missing-not-valid

SET LOCAL statement_timeout = '60s';

ALTER TABLE price_changes
    ADD COLUMN extra_machines bigint NOT NULL DEFAULT 0
        CONSTRAINT price_changes_extra_machines CHECK (extra_machines >= 0);

CREATE OR REPLACE FUNCTION prices_of(own text) RETURNS jsonb LANGUAGE sql STABLE AS $$
    SELECT jsonb_agg(jsonb_build_object('since', since, 'usd_per_hour', usd_per_hour::text,
            'extra_machines', extra_machines)
        ORDER BY since, usd_per_hour)
    FROM price_changes WHERE attempt_id = own
$$;

-- Prices and availability of offers in buckets of five minutes, which belong to no team. Bucket 0 begins at 1970-01-01;
-- broker/store/rules/offer_history.py has the format of the documents.
SET LOCAL statement_timeout = '60s';

CREATE TABLE offer_history (
    -- '': the buckets in which the listing of the provider was read
    accelerator text NOT NULL,
    -- the bucket of a sample; the first bucket of the day of a merged row
    bucket bigint NOT NULL,
    provider text NOT NULL,
    merged boolean NOT NULL,
    document bytea NOT NULL,
    PRIMARY KEY (accelerator, bucket, provider, merged)
);
-- The documents are compressed by the broker.
ALTER TABLE offer_history ALTER COLUMN document SET STORAGE EXTERNAL;
CREATE INDEX offer_history_samples ON offer_history (bucket) WHERE NOT merged;
CREATE INDEX offer_history_days ON offer_history (bucket) WHERE merged;

-- Creates that a cloud refused for lack of capacity, once a bucket.
CREATE TABLE offer_refusals (
    accelerator text NOT NULL,
    bucket bigint NOT NULL,
    provider text NOT NULL,
    cloud text NOT NULL,
    region text NOT NULL,
    gpus bigint NOT NULL,
    spot boolean NOT NULL,
    PRIMARY KEY (accelerator, bucket, provider, cloud, region, gpus, spot)
);

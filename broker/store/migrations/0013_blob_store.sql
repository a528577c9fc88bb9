-- Which blob store its jobs lie in, by the mark that is kept there: brokers with another one would hear no machine.

SET LOCAL statement_timeout = '60s';

ALTER TABLE installation ADD COLUMN blob_store text;

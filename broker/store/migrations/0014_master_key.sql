-- By which master key its secrets are sealed, as that key's mark: with another one none of them opens.

SET LOCAL statement_timeout = '60s';

ALTER TABLE installation ADD COLUMN master_key text;

"""Controllers: loops that each move one concern of jobs and attempts forward.

A controller claims rows, gathers facts, decides by the pure rules of `lifecycle`, `quote`, `billing` and `policy`, and
applies the decision under a fence. `fleet.py` wires all of them.

| controller | claims | concern |
|---|---|---|
| placement | jobs queued, awaiting approval, recovering | quote, choose, admit with a reservation |
| launch | attempts planned, launching | create once, adopt machines of a lost create |
| liveness | attempts booting, training | heartbeats and listings: alive, dead or unknown |
| interruption | attempts with a signal, draining | stop, cap, notice: ask for a checkpoint, then destroy |
| termination | attempts terminating | destroy until absence is proven; close the ledger |
| billing | all live attempts, no lease | charge by the billing quantum, raise the cap signal |
| budgets | policies, no lease | report thresholds once a window, signal the attempts that a budget drains |
| guard | training attempts, no lease | report forecasts past the cap or the deadline, and idle machines |
| retention | jobs with stored data, by lease | charge for stored data, delete what is due |
| sweep | the clouds' listings, no lease | destroy machines without a live attempt |
| deadman | nothing | renew the broker's lease while the database works |
| outbox | deliveries of channels | deliver notifications at least once |
| digest | charges of a period | post a notice each day and each week |
"""

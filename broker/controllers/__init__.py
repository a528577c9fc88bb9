"""Do it, again and again: one concern a file, each `load → decide → act → apply`.

| controller | claims | concern |
|---|---|---|
| placement | jobs queued, recovering | quote, choose, admit with a reservation |
| launch | attempts planned, launching | create once, adopt what was created |
| liveness | attempts booting, training | beats and inventory: alive, dead or unknown |
| interruption | attempts with a signal, draining | stop, cap, notice: checkpoint, then let go |
| termination | attempts terminating | destroy until the cloud says absent; settle |
| billing | all live attempts, no lease | charge by the quantum, raise the cap signal |
| budgets | policies, no lease | tell thresholds once a window, signal what a budget drains |
| guard | training attempts, no lease | a forecast past the cap or the deadline, machines that do nothing |
| retention | jobs with data, by turns | charge for what is kept, delete what is due |
| sweep | the clouds' listings, no lease | destroy what nobody answers for |
| deadman | nothing | keep the broker's lease fresh while the database works |
| outbox | deliveries of channels | tell people and programs, at least once |
| digest | what was paid | post a notice a day and a week |
"""

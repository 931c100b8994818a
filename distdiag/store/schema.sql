-- run.db: the one interface between the monitor (the only writer) and every reader.
-- Times are seconds since the run began (meta.started_unix_s) unless the name says otherwise.
-- NULL means "not measured"; 0 means measured and zero.

CREATE TABLE IF NOT EXISTS meta (          -- one value per key; written once or replaced
  key   TEXT PRIMARY KEY,                  -- schema_version, started_unix_s, name, world_size, backend, state,
  value TEXT                               -- state_since_s, ended_s, attempt, torch, distdiag, command, max_steps, monitor_pid …
                                           -- checks: JSON, which kinds of findings could be judged, and why not
                                           -- metrics: address of /metrics, if the monitor serves it
                                           -- nodes: JSON, on node 0: when each node that sends its state was heard last, its
                                           -- wall clock minus node 0's, how wrong that may be; refused connections
                                           -- hang_ended_s: when the monitor ended the ranks of a proved hang, if it was asked to
);

CREATE TABLE IF NOT EXISTS rank (          -- the newest state of every rank, for the sqlite3 shell and for pandas
  rank INTEGER PRIMARY KEY,
  node INTEGER, local_rank INTEGER, host TEXT, pid INTEGER, gpu INTEGER,
  life TEXT,                               -- starting running finished crashed killed stopped detached silent
  exit_code INTEGER, signal INTEGER, exception TEXT,
  t_s REAL, heartbeat_age_s REAL,
  phase TEXT, phase_age_s REAL, step INTEGER, epoch INTEGER,
  file TEXT, line INTEGER, function TEXT,  -- where the main thread is: the user's innermost frame
  waiting_op TEXT, waiting_group TEXT, waiting_seq INTEGER, waiting_bytes INTEGER, waiting_age_s REAL,
  rss_bytes INTEGER, dropped INTEGER, recorder_errors INTEGER, recorder_error TEXT
);

CREATE TABLE IF NOT EXISTS pgroup (        -- process groups as the ranks created them
  name TEXT PRIMARY KEY, description TEXT, backend TEXT, size INTEGER, ranks TEXT  -- ranks: '0-3,8'
);

CREATE TABLE IF NOT EXISTS step (          -- one row per rank and optimizer step
  rank INTEGER, step INTEGER, epoch INTEGER, t_end_s REAL,
  step_ms REAL, data_ms REAL, h2d_ms REAL, forward_ms REAL, backward_ms REAL, optimizer_ms REAL,
  other_ms REAL, wait_ms REAL, self_ms REAL,  -- self = step - wait (waiting for other ranks; DDP buffer waits are not in forward_ms)
  late_ms REAL,                            -- arrival at the step's first collective after the first rank; the slow rank arrives last
  samples INTEGER, loss REAL, rss_bytes INTEGER, device_bytes INTEGER,
  comm_ms REAL,                            -- DDP's gradients, first bucket's start to last one's end; only of steps that DDP timed
  exposed_ms REAL,                         -- the part of comm_ms that no computation of gradients hides
  PRIMARY KEY (step, rank)                 -- in the order of writing: one page a step, not one page a rank
) WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS step_minute (   -- what remains of step rows older than the size bound allows; of the oldest, 10 or 60 minutes together
  rank INTEGER, minute INTEGER, steps INTEGER, step_ms REAL, data_ms REAL, h2d_ms REAL, forward_ms REAL,
  backward_ms REAL, optimizer_ms REAL, other_ms REAL, wait_ms REAL, self_ms REAL, samples INTEGER, loss REAL,
  PRIMARY KEY (minute, rank)
) WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS collective (    -- one row per collective that all members completed (sampled where there are many)
  pgroup TEXT, seq INTEGER, op TEXT, dtype TEXT, bytes INTEGER, ranks INTEGER,
  t_s REAL,                                -- first arrival
  duration_us REAL,                        -- on the rank that arrived last: nothing of it is waiting for a late rank
  skew_us REAL, late_rank INTEGER, step INTEGER,
  arrivals_us TEXT,                        -- '0,12,340': after the first arrival, in the order of pgroup.ranks; only of some rows
  PRIMARY KEY (pgroup, seq)
) WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS frame (         -- the screen's data at one moment: live view and time travel
  t_s REAL PRIMARY KEY, state TEXT, state_text TEXT,
  ranks BLOB                               -- msgpack of store.frames.RankRow, by rank; zlib
);

CREATE TABLE IF NOT EXISTS host (
  t_s REAL, node INTEGER, host TEXT, cpu_pct REAL, load1 REAL, cores INTEGER,
  memory_used_bytes INTEGER, memory_total_bytes INTEGER,
  disk_read_bytes_per_s REAL, disk_write_bytes_per_s REAL, net_sent_bytes_per_s REAL, net_recv_bytes_per_s REAL,
  PRIMARY KEY (t_s, node)
) WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS process (
  t_s REAL, rank INTEGER, cpu_pct REAL, rss_bytes INTEGER, threads INTEGER, children INTEGER, children_cpu_pct REAL,
  read_bytes_per_s REAL, write_bytes_per_s REAL,
  PRIMARY KEY (t_s, rank)
) WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS gpu (
  t_s REAL, node INTEGER, gpu INTEGER, uuid TEXT, name TEXT, rank INTEGER,
  utilization_pct REAL, memory_utilization_pct REAL, memory_used_bytes INTEGER, memory_total_bytes INTEGER,
  power_w REAL, power_limit_w REAL, temperature_c REAL, sm_clock_mhz REAL, sm_clock_max_mhz REAL,
  throttle TEXT,                           -- NVML's reasons, comma-separated; '' = none
  ecc_uncorrected INTEGER, pcie_generation INTEGER, pcie_generation_max INTEGER, pcie_width INTEGER, pcie_width_max INTEGER,
  nvlink_active INTEGER, processes INTEGER,
  PRIMARY KEY (t_s, node, gpu)
) WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS scalar (        -- what the job logged: handle.log(loss=…)
  rank INTEGER, step INTEGER, name TEXT, value REAL, t_s REAL
);

CREATE TABLE IF NOT EXISTS finding (       -- one row per finding, replaced as it develops, kept when it clears
  id INTEGER PRIMARY KEY, key TEXT UNIQUE, kind TEXT, cause TEXT, severity TEXT, certainty TEXT,
  first_seen_s REAL, detected_s REAL, cleared_s REAL,
  message TEXT, json TEXT                  -- json: the whole finding as contract.md has it
);

CREATE TABLE IF NOT EXISTS probe (         -- probe results recorded into this run
  t_s REAL, name TEXT, verdict TEXT, json TEXT
);

CREATE TABLE IF NOT EXISTS event (         -- what the monitor and the job reported about themselves
  t_s REAL, source TEXT, level TEXT, text TEXT
);

CREATE TABLE IF NOT EXISTS loader (        -- every DataLoader of every rank, newest state
  rank INTEGER, loader INTEGER, file TEXT, line INTEGER, length INTEGER, batch_size INTEGER, dataset_length INTEGER,
  drop_last INTEGER, distributed_sampler INTEGER, sampler_epoch INTEGER, shuffle INTEGER,
  epoch INTEGER, batches INTEGER, exhausted INTEGER, in_training INTEGER, workers INTEGER,
  fingerprint INTEGER, previous_fingerprint INTEGER,  -- of the first batches of this epoch and the one before
  fed INTEGER,                             -- no loader: what a module was given in steps without one
  PRIMARY KEY (rank, loader)
) WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS ddp (           -- the gradients of every DDP module of every rank, newest state
  rank INTEGER, model INTEGER, name TEXT, pgroup TEXT,
  backwards INTEGER,                       -- that averaged gradients so far
  bytes INTEGER, buckets INTEGER, bucket_bytes TEXT, bucket_cap_bytes INTEGER,  -- bucket_bytes: '1024,2048', the first 256
  gradient_as_bucket_view INTEGER, comm_hook TEXT, dtypes TEXT,
  PRIMARY KEY (rank, model)
) WITHOUT ROWID;

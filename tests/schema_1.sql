-- The store as schema 1 made it: what test_store.py migrates.
CREATE TABLE "app" ("id" INTEGER NOT NULL PRIMARY KEY, "name" VARCHAR(255) NOT NULL, "create_time"
  INTEGER NOT NULL, "next_number" INTEGER NOT NULL);
CREATE UNIQUE INDEX "app_name" ON "app" ("name");
CREATE TABLE "app_version" ("id" INTEGER NOT NULL PRIMARY KEY, "app_id" INTEGER NOT NULL,
  "create_time" INTEGER NOT NULL, "platform" VARCHAR(255) NOT NULL, "version_num" INTEGER NOT
  NULL, "plan_class" VARCHAR(255) NOT NULL, "files" TEXT NOT NULL, FOREIGN KEY ("app_id")
  REFERENCES "app" ("id"));
CREATE INDEX "app_version_app_id" ON "app_version" ("app_id");
CREATE UNIQUE INDEX "app_version_app_id_platform_version_num_plan_class" ON "app_version"
  ("app_id", "platform", "version_num", "plan_class");
CREATE TABLE "firing" ("id" INTEGER NOT NULL PRIMARY KEY, "app_id" INTEGER NOT NULL, "rule"
  VARCHAR(255) NOT NULL, "n" INTEGER NOT NULL, FOREIGN KEY ("app_id") REFERENCES "app" ("id"));
CREATE INDEX "firing_app_id" ON "firing" ("app_id");
CREATE UNIQUE INDEX "firing_app_id_rule" ON "firing" ("app_id", "rule");
CREATE TABLE "user" ("id" INTEGER NOT NULL PRIMARY KEY, "create_time" INTEGER NOT NULL, "name"
  VARCHAR(255) NOT NULL, "email_addr" VARCHAR(255), "passwd_hash" VARCHAR(255) NOT NULL,
  "authenticator" VARCHAR(255) NOT NULL, "total_credit" REAL NOT NULL, "expavg_credit" REAL NOT
  NULL, "expavg_time" REAL NOT NULL);
CREATE UNIQUE INDEX "user_email_addr" ON "user" ("email_addr");
CREATE UNIQUE INDEX "user_authenticator" ON "user" ("authenticator");
CREATE TABLE "host" ("id" INTEGER NOT NULL PRIMARY KEY, "user_id" INTEGER NOT NULL, "create_time"
  INTEGER NOT NULL, "host_cpid" VARCHAR(255) NOT NULL, "rpc_time" INTEGER NOT NULL, "rpc_seqno"
  INTEGER NOT NULL, "work_time" INTEGER NOT NULL, "domain_name" VARCHAR(255) NOT NULL, "p_ncpus"
  INTEGER NOT NULL, "p_vendor" VARCHAR(255) NOT NULL, "p_model" VARCHAR(255) NOT NULL, "p_fpops"
  REAL NOT NULL, "m_nbytes" REAL NOT NULL, "d_free" REAL NOT NULL, "d_total" REAL NOT NULL,
  "os_name" VARCHAR(255) NOT NULL, "os_version" VARCHAR(255) NOT NULL, "client_version"
  VARCHAR(255) NOT NULL, "on_frac" REAL NOT NULL, "active_frac" REAL NOT NULL, "total_credit" REAL
  NOT NULL, "expavg_credit" REAL NOT NULL, "expavg_time" REAL NOT NULL, "avg_turnaround" REAL NOT
  NULL, "why_no_work" TEXT NOT NULL, FOREIGN KEY ("user_id") REFERENCES "user" ("id"));
CREATE INDEX "host_user_id" ON "host" ("user_id");
CREATE INDEX "host_host_cpid" ON "host" ("host_cpid");
CREATE TABLE "host_app_version" ("id" INTEGER NOT NULL PRIMARY KEY, "host_id" INTEGER NOT NULL,
  "app_version_id" INTEGER NOT NULL, "max_jobs_per_day" INTEGER NOT NULL, "n_jobs_today" INTEGER
  NOT NULL, "quota_day" INTEGER NOT NULL, "consecutive_valid" INTEGER NOT NULL, "et_n" INTEGER NOT
  NULL, "et_avg" REAL NOT NULL, FOREIGN KEY ("host_id") REFERENCES "host" ("id"), FOREIGN KEY
  ("app_version_id") REFERENCES "app_version" ("id"));
CREATE INDEX "host_app_version_app_version_id" ON "host_app_version" ("app_version_id");
CREATE UNIQUE INDEX "host_app_version_host_id_app_version_id" ON "host_app_version" ("host_id",
  "app_version_id");
CREATE TABLE "meta" ("name" VARCHAR(255) NOT NULL PRIMARY KEY, "value" INTEGER NOT NULL);
CREATE TABLE "workunit" ("id" INTEGER NOT NULL PRIMARY KEY, "app_id" INTEGER NOT NULL, "name"
  VARCHAR(255) NOT NULL, "number" INTEGER, "create_time" INTEGER NOT NULL, "mod_time" INTEGER NOT
  NULL, "input_files" TEXT NOT NULL, "priority" INTEGER NOT NULL, "batch" INTEGER NOT NULL,
  "rsc_fpops_est" REAL NOT NULL, "rsc_fpops_bound" REAL NOT NULL, "rsc_memory_bound" REAL NOT
  NULL, "rsc_disk_bound" REAL NOT NULL, "delay_bound" INTEGER NOT NULL, "min_quorum" INTEGER NOT
  NULL, "target_nresults" INTEGER NOT NULL, "max_error_results" INTEGER NOT NULL,
  "max_total_results" INTEGER NOT NULL, "max_success_results" INTEGER NOT NULL,
  "transitioner_flags" INTEGER NOT NULL, "canonical_credit" REAL NOT NULL, "transition_time"
  INTEGER NOT NULL, "canonical_resultid" INTEGER NOT NULL, "error_mask" INTEGER NOT NULL,
  "need_validate" INTEGER NOT NULL, "assimilate_state" INTEGER NOT NULL, "file_delete_state"
  INTEGER NOT NULL, FOREIGN KEY ("app_id") REFERENCES "app" ("id"));
CREATE UNIQUE INDEX "workunit_name" ON "workunit" ("name");
CREATE INDEX "workunit_due" ON "workunit" ("transition_time") WHERE transition_time < 2147483647;
CREATE INDEX "workunit_to_validate" ON "workunit" ("id", "app_id") WHERE need_validate;
CREATE INDEX "workunit_to_assimilate" ON "workunit" ("id", "app_id") WHERE assimilate_state = 1;
CREATE INDEX "workunit_files_ready" ON "workunit" ("id") WHERE file_delete_state = 1;
CREATE INDEX "workunit_files_stuck" ON "workunit" ("id") WHERE file_delete_state = 3;
CREATE INDEX "workunit_to_purge" ON "workunit" ("mod_time") WHERE file_delete_state = 2;
CREATE TABLE "result" ("id" INTEGER NOT NULL PRIMARY KEY, "workunit_id" INTEGER NOT NULL, "app_id"
  INTEGER NOT NULL, "name" VARCHAR(255) NOT NULL, "create_time" INTEGER NOT NULL, "priority"
  INTEGER NOT NULL, "server_state" INTEGER NOT NULL, "outcome" INTEGER NOT NULL, "client_state"
  INTEGER NOT NULL, "validate_state" INTEGER NOT NULL, "file_delete_state" INTEGER NOT NULL,
  "host_id" INTEGER, "user_id" INTEGER, "app_version_id" INTEGER, "sent_time" INTEGER NOT NULL,
  "report_deadline" INTEGER NOT NULL, "received_time" INTEGER NOT NULL, "exit_status" INTEGER NOT
  NULL, "cpu_time" REAL NOT NULL, "elapsed_time" REAL NOT NULL, "granted_credit" REAL NOT NULL,
  "output_files" TEXT, "refusals" TEXT, "stderr_out" TEXT NOT NULL, FOREIGN KEY ("workunit_id")
  REFERENCES "workunit" ("id"), FOREIGN KEY ("app_id") REFERENCES "app" ("id"), FOREIGN KEY
  ("host_id") REFERENCES "host" ("id"), FOREIGN KEY ("user_id") REFERENCES "user" ("id"), FOREIGN
  KEY ("app_version_id") REFERENCES "app_version" ("id"));
CREATE INDEX "result_workunit_id" ON "result" ("workunit_id");
CREATE UNIQUE INDEX "result_name" ON "result" ("name");
CREATE INDEX "result_unsent" ON "result" ("priority" DESC, "id", "app_id") WHERE server_state = 2;
CREATE INDEX "result_in_progress" ON "result" ("host_id", "app_id") WHERE server_state = 4;
CREATE INDEX "result_files_ready" ON "result" ("id") WHERE file_delete_state = 1;
CREATE INDEX "result_files_stuck" ON "result" ("id") WHERE file_delete_state = 3;

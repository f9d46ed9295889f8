# What people type. `make` alone lists the targets.

CARGO ?= cargo

.DEFAULT_GOAL := help

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { \
	  n = split($$2, words, " "); line = sprintf("  make %-16s", $$1); \
	  for (i = 1; i <= n; i++) { \
	    if (length(line) + 1 + length(words[i]) > 80) { print line; line = sprintf("%23s", ""); } \
	    line = line " " words[i]; \
	  } print line }' $(MAKEFILE_LIST)

# DEMO=qemu, DEMO=kvm and DEMO=microvm choose the kind of VM. Without a choice it is QEMU, under emulation and then, where
# there is KVM, on that; and a microvm where neither QEMU nor the Linux guest can be had. Arguments for `godwit-demo` go
# into DEMO_ARGUMENTS.
DEMO ?=
DEMO_ARGUMENTS ?=
# The demo's build is made to be quick: no optimisation but where a page is looked at, no exporter for OpenTelemetry and no
# NATS (--no-default-features). These packages are optimised for tests, and are not worth the wait here.
DEMO_PLAIN := procfs procfs-core rustix rustls
DEMO_BUILD := CARGO_INCREMENTAL=0 CARGO_PROFILE_DEV_OPT_LEVEL=0 $(CARGO) build --quiet --target-dir target \
  $(foreach package,$(DEMO_PLAIN),--config profile.dev.package.$(package).opt-level=0)

.PHONY: demo
demo: ## move a running guest between two VMs (DEMO=qemu|kvm|microvm), with proof that its memory arrived exact
	@machines='$(DEMO)'; provided=; \
	case "$$machines" in ''|qemu|kvm|microvm) ;; *) echo "DEMO=$$machines: it must be qemu, kvm or microvm; arguments go into DEMO_ARGUMENTS" >&2; exit 2;; esac; \
	if [ "$$machines" != microvm ]; then \
	  $(DEMO_BUILD) --package xtask || exit 1; \
	  echo "guest and QEMU are made ready while godwit is built"; \
	  trap '[ -z "$$provided" ] || kill -- -$$provided 2>/dev/null' EXIT; trap 'exit 130' INT TERM; \
	  setsid sh -c 'target/debug/xtask guest && target/debug/xtask qemu-for-demo' & provided=$$!; \
	fi; \
	echo "building godwit, without all optimisation (figures of a release build are in docs/benchmarks.md)"; \
	$(DEMO_BUILD) --package godwit-cli --package godwit-demo --bin godwit --bin godwit-demo --no-default-features || exit 1; \
	if [ -n "$$provided" ]; then \
	  if wait $$provided; then provided=; \
	    if [ -z "$$machines" ]; then \
	      if [ -w /dev/kvm ]; then machines='qemu kvm'; \
	      else machines=qemu; echo "no right to /dev/kvm, or no KVM: the guest runs under emulation alone"; fi; \
	    fi; \
	  elif [ -z "$$machines" ]; then machines=microvm; echo "no QEMU to be had: using microvms"; \
	  else exit 1; fi; \
	fi; \
	for machine in $$machines; do \
	  [ "$$machine" = "$${machines%% *}" ] || echo; \
	  target/debug/godwit-demo --machine $$machine $(DEMO_ARGUMENTS) || exit $$?; \
	done

# Tests make up faults by options that only this feature brings. Programs and tests are built by one
# command, since features that tests ask for would else have everything compiled a second time.
TEST_BUILD := --workspace --features godwit-cli/test-hooks --bins --tests --examples

.PHONY: test
test: guest qemu previous nats ## run all tests, those with real QEMUs and guests among them
	@$(MAKE) --no-print-directory image || echo "tests of the image will say that they are skipped"
	@$(CARGO) build $(TEST_BUILD)
	@scripts/run-tests.sh

.PHONY: deb
deb: ## make the Debian packages godwit, godwitd and godwit-stamp: target/deb/NAME_VERSION_ARCHITECTURE.deb
	@$(CARGO) run --quiet --package xtask -- deb

.PHONY: test-long
test-long: guest qemu previous nats ## the tests that make test leaves out: the same at many more moments (half an hour or more)
	@$(CARGO) build $(TEST_BUILD)
	@# The last one measures, and is run by its name.
	@scripts/run-tests.sh --ignored --test-threads=1 --skip what_tracking_does_to_huge_pages

# `make mutants MUTANTS='--package godwit-qemu --shard 0/40'` for another slice; see docs/testing.md.
MUTANTS ?= --package godwit-protocol --package godwit-wire --package godwit-fingerprints --package godwit-policy

.PHONY: mutants
mutants: ## break the code in many small ways, one after the other, and list what no test notices (cargo-mutants)
	@$(CARGO) mutants --version >/dev/null 2>&1 || { echo "installing cargo-mutants with cargo"; $(CARGO) install --quiet --locked cargo-mutants; }
	@$(CARGO) mutants --no-shuffle --minimum-test-timeout 60 --output target/mutants $(MUTANTS)

# `make soak SOAK='--witnesses --each 10'` for the VMs with a witness; others:
# `make soak SOAK='--for 8h --faults 10'`, `SOAK='--only kvm-disk --moves 20'`; see --help.
SOAK ?=

.PHONY: soak
soak: guest qemu $(if $(findstring witness,$(SOAK))$(findstring damage,$(SOAK)),witnesses) ## eight VMs of every kind, moved to and fro under load: 500 moves (SOAK='--for 8h --faults 10' for more)
	@$(CARGO) build --package godwit-cli --package godwit-soak --features godwit-cli/test-hooks --bins
	@target/debug/godwit-soak $(SOAK)

# How often each of them repeats itself.
GODWIT_SOAK ?= 40

.PHONY: soak-tests
soak-tests: guest qemu ## the tests that find what is rare, forty times over (GODWIT_SOAK=N for more or less; an hour)
	@$(CARGO) build --workspace --bins --features godwit-cli/test-hooks
	@GODWIT_SOAK=$(GODWIT_SOAK) $(CARGO) test --package godwit-e2e --test e2e direct_io:: -- --nocapture
	@GODWIT_SOAK=$(GODWIT_SOAK) $(CARGO) test --package godwit-e2e --test e2e free_memory::no_page_in_use -- --nocapture
	@GODWIT_CASES=$$(( $(GODWIT_SOAK) * 5000 )) $(CARGO) test --package godwit-balloon --lib

# `make faults FAULTS='--only 1,40 --adapter kvm'` for a part, as --help tells; FULL=1: a thousand and more at random moments.
FAULTS ?= $(if $(FULL),--random 1400)

.PHONY: faults
faults: guest qemu ## every fault at every step of a migration with every kind of VM (an hour; FULL=1: a thousand at random)
	@$(CARGO) build --package godwit-cli --package godwit-faults --features godwit-cli/test-hooks --bins
	@target/debug/godwit-faults $(FAULTS)

# `make defects DEFECTS='--only flip,late --times 10'` for a part.
DEFECTS ?=

.PHONY: defects
defects: guest qemu ## deliberate defects, each a hundred times, and who finds them (two hours; DEFECTS=--add goes on)
	@$(CARGO) build --package godwit-cli --package godwit-faults --features godwit-cli/test-hooks --bins
	@target/debug/godwit-defects $(DEFECTS)

# `make faults-postcopy FOLLOWED='--kills 10 --cuts 0 --lost 0'` for a part, `FOLLOWED='--only microvm'` for those alone.
FOLLOWED ?=

.PHONY: faults-postcopy
faults-postcopy: guest qemu ## kills, cuts and lost sources at random moments while the memory of guests follows them (FOLLOWED='--kills 10 --cuts 0 --lost 0' for a part)
	@$(CARGO) build --package godwit-cli --package godwit-faults --features godwit-cli/test-hooks --bins
	@target/debug/godwit-followed $(FOLLOWED)

.PHONY: faults-coordinators
faults-coordinators: nats ## kill or stop one of several coordinators of an evacuation at a hundred random moments (ten minutes)
	@$(CARGO) build --package godwit-cli --features godwit-cli/test-hooks --bins
	@$(CARGO) test --package godwit-e2e --test e2e coordinators:: -- --ignored --nocapture

# Seconds for each target. `make fuzz FUZZ='frames nbd'` for some of them.
FUZZ_SECONDS ?= 60
FUZZ ?=

.PHONY: fuzz
fuzz: ## fuzz with coverage what listens to others, each for a minute (cargo-fuzz, a nightly toolchain; FUZZ_SECONDS=N)
	@FUZZ_SECONDS=$(FUZZ_SECONDS) scripts/fuzz.sh $(FUZZ)

# Cases of each.
CASES ?= 200000

.PHONY: cases
cases: ## arbitrary bytes and rings for whatever listens to others: frames, NBD replies, virtio devices (CASES=N)
	@PROPTEST_CASES=$(CASES) $(CARGO) test --quiet --release --package godwit-wire --package godwit-nbd
	@GODWIT_CASES=$(CASES) $(CARGO) test --quiet --release --package godwit-balloon --package godwit-virtio --lib && echo "nothing found in $(CASES) cases of each"

.PHONY: publish-dry-run
publish-dry-run: ## pack the crates that are meant for others, build each from its package alone, and upload nothing
	@$(CARGO) publish --dry-run --workspace --allow-dirty

.PHONY: semver
semver: ## whether what the crates meant for others offer fits their version, beside the release before (cargo-semver-checks)
	@$(CARGO) semver-checks --version >/dev/null 2>&1 || { echo "installing cargo-semver-checks with cargo (six minutes)"; $(CARGO) install --quiet --locked cargo-semver-checks; }
	@$(CARGO) run --quiet --package xtask -- semver

.PHONY: check
check: lint ## format, lints and the tests that need no QEMU
	@$(CARGO) test --quiet --workspace --exclude godwit-e2e --exclude godwit-testbed --exclude godwit-faults && echo "all checks passed"

.PHONY: lint
lint: ## format and lints alone
	@$(CARGO) fmt --all --check
	@$(CARGO) clippy --quiet --workspace --features godwit-cli/test-hooks --all-targets -- --deny warnings
	@# What ships is built without what only tests ask for.
	@$(CARGO) clippy --quiet --workspace --lib --bins -- --deny warnings

.PHONY: test-shipped
test-shipped: ## what the command has when it is built as it ships
	@# Of the whole workspace, so that what it needs is compiled as it was for make test.
	@$(CARGO) test --quiet --workspace --bin godwit

.PHONY: guest
guest: ## build the self-checking Linux guest: target/guest/vmlinuz and initramfs.cpio
	@$(CARGO) run --quiet --package xtask -- guest

.PHONY: stamp
stamp: ## build godwit-stamp, which tests any live migration from inside: target/stamp/godwit-stamp
	@$(CARGO) run --quiet --package xtask -- stamp

.PHONY: witnesses
witnesses: guest ## guests with SQLite, fio, stress-ng, a compiler and Redis beside the stamps, for `make soak`: target/witnesses
	@$(CARGO) run --quiet --package xtask -- witnesses

.PHONY: image
image: ## godwit-stamp for other hypervisors: kernel and initramfs, an ISO, a seed for cloud images: target/image
	@$(CARGO) run --quiet --package xtask -- image

.PHONY: guest-database
guest-database: guest qemu ## the memory of a guest with a database, target/guest/database.ram, for `godwit-codecs`
	@$(CARGO) run --quiet --package xtask -- guest-database

.PHONY: qemu
qemu: ## install QEMU and qemu-utils if missing; unpack QEMU 10 and the newest in target/
	@$(CARGO) run --quiet --package xtask -- qemu

.PHONY: nats
nats: ## unpack a NATS server, for the tests of several coordinators: target/nats
	@$(CARGO) run --quiet --package xtask -- nats

.PHONY: book
book: ## the documents as one book, by mdBook, which is built if missing: target/book/html/index.html
	@$(CARGO) run --quiet --package xtask -- book

.PHONY: previous
previous: ## build the godwit of the release before this one, for the test that runs both: target/previous
	@$(CARGO) run --quiet --package xtask -- previous

# `make bench-qemu BENCH_QEMU='--rounds 1'` for other figures; see the program's own usage line.
BENCH_QEMU ?= --rounds 5 --moves 50

.PHONY: bench-qemu
bench-qemu: ## compare with QEMU's own migration; fifty moves of a busy guest under QEMU 7.2
	@$(CARGO) build --quiet --release --workspace --bin godwit --bin qemu
	@$(CARGO) run --quiet --release --package godwit-bench --bin qemu -- $(BENCH_QEMU)

# `make bench-any BENCH_ANY='--only idle-1 --rounds 1'` for a part; see the program's own usage line.
BENCH_ANY ?=

.PHONY: bench-any
bench-any: guest qemu ## anonymous memory on huge pages, KVM and TCG, against each of QEMU's fast ways (needs 22 GiB)
	@$(CARGO) build --quiet --release --package godwit-cli --bin godwit --package godwit-bench --bin any
	@$(CARGO) run --quiet --release --package godwit-bench --bin any -- $(BENCH_ANY)

# `make bench-peers BENCH_PEERS='--only idle-1/loop --rounds 1'` for a part, `BENCH_PEERS=--list` for the cells; see --help.
BENCH_PEERS ?=

.PHONY: bench-peers
bench-peers: guest qemu ## a grid of guests and links, each moved by godwit and by QEMU in all of its ways; needs root (BENCH_PEERS=--list)
	@$(CARGO) build --quiet --release --package godwit-cli --bin godwit --package godwit-testbed --bin link-emulator --package godwit-bench --bin peers
	@$(CARGO) run --quiet --release --package godwit-bench --bin peers -- $(BENCH_PEERS)

# `make bench-managers BENCH_MANAGERS='--only idle --rounds 1'` for a part.
BENCH_MANAGERS ?=

.PHONY: bench-managers
bench-managers: guest qemu ## domains between two libvirt daemons, beside virsh migrate; needs root (ten minutes)
	@$(CARGO) build --quiet --release --package godwit-cli --bin godwit --package godwit-bench --bin managers
	@$(CARGO) run --quiet --release --package godwit-bench --bin managers -- $(BENCH_MANAGERS)

# `make bench-secure BENCH_SECURE='--only throughput'` for a part.
BENCH_SECURE ?=

.PHONY: bench-secure
bench-secure: guest qemu ## what encryption costs (ten minutes)
	@$(CARGO) build --quiet --release --package godwit-cli --bin godwit --package godwit-bench --bin secure
	@$(CARGO) run --quiet --release --package godwit-bench --bin secure -- $(BENCH_SECURE)

# `make bench-scale BENCH_SCALE='--sparse 1,16 --full 1 --rounds 1'` for a part.
BENCH_SCALE ?=

.PHONY: bench-scale
bench-scale: guest qemu ## what the steps of a move cost by the size of the guest, to a terabyte; needs KVM (four minutes; 20 GiB of memory)
	@$(CARGO) build --quiet --release --package godwit-cli --bin godwit --package godwit-bench --bin scale
	@$(CARGO) run --quiet --release --package godwit-bench --bin scale -- $(BENCH_SCALE)

# `make bench-upgrade BENCH_UPGRADE='--sizes 1 --rounds 2'` for a part.
BENCH_UPGRADE ?=

.PHONY: bench-upgrade
bench-upgrade: guest qemu ## how long a guest of 1, 8 and 16 GiB stands still in an upgrade (three minutes; 6 GiB of memory)
	@$(CARGO) build --quiet --release --package godwit-cli --bin godwit --package godwit-bench --bin upgrade
	@$(CARGO) run --quiet --release --package godwit-bench --bin upgrade -- $(BENCH_UPGRADE)

# `make bench-operators BENCH_OPERATORS='--fresh-clone 212'` with the seconds from a fresh clone to the first finished
# migration; see the program's own usage line.
BENCH_OPERATORS ?=

.PHONY: bench-operators
bench-operators: guest qemu ## what operators see: eight VMs that leave, the help, the report, upgrades (five minutes; 8 GiB of memory)
	@$(CARGO) build --quiet --release --package godwit-cli --bin godwit --package godwit-bench --bin operators
	@$(CARGO) run --quiet --release --package godwit-bench --bin operators -- $(BENCH_OPERATORS)

# `make bench-postcopy BENCH_POSTCOPY='--under kvm --rounds 2'` for a part.
BENCH_POSTCOPY ?=

.PHONY: bench-postcopy
bench-postcopy: guest qemu ## guests that leave before their memory, beside QEMU's own post-copy; needs root (five minutes)
	@$(CARGO) build --quiet --release --package godwit-cli --bin godwit --package godwit-bench --bin postcopy
	@$(CARGO) run --quiet --release --package godwit-bench --bin postcopy -- $(BENCH_POSTCOPY)

# `make bench-proof BENCH_PROOF='--memory 2048 --fill 1536 --rounds 3'` for a smaller one.
BENCH_PROOF ?=

.PHONY: bench-proof
bench-proof: guest qemu ## what --verify costs a guest of 12 GiB (fifteen minutes; 19 GiB of memory)
	@$(CARGO) build --quiet --release --package godwit-cli --bin godwit --package godwit-bench --bin proof
	@$(CARGO) run --quiet --release --package godwit-bench --bin proof -- $(BENCH_PROOF)

.PHONY: bench-stamp
bench-stamp: ## what stamping and checking cost a processor (a minute)
	@$(CARGO) build --quiet --release --package godwit-stamp --bin godwit-stamp --example costs
	@target/release/examples/costs

.PHONY: bench-sim
bench-sim: ## a million simulated migrations in which something goes wrong, within five minutes
	@$(CARGO) run --quiet --release --package godwit-sim --example faults

# `make bench-bulk BENCH_BULK='--size 4 --only raw'` for other figures; see the program's own usage line.
BENCH_BULK ?=

.PHONY: bench-bulk
bench-bulk: ## what a page costs on its way: uncompressed, compressed, limited (six minutes)
	@$(CARGO) run --quiet --release --package godwit-bench --bin bulk -- $(BENCH_BULK)

.PHONY: bench-structures
bench-structures: ## dirty bitmaps and memory slots against the limits of the machine (three minutes)
	@$(CARGO) run --quiet --release --package godwit-bench --bin structures

# `make bench-microvm BENCH_MICROVM='--mode full'` for other figures; see the program's own usage line.
BENCH_MICROVM ?= --moves 20

.PHONY: bench-microvm
bench-microvm: ## downtime of a 1 GiB microvm, moved twenty times over loopback
	@$(CARGO) build --quiet --release --workspace --bin godwit --bin microvm
	@$(CARGO) run --quiet --release --package godwit-bench --bin microvm -- $(BENCH_MICROVM)

# `make bench-policy BENCH_POLICY='--patience 60'` for other figures; see the program's own usage line.
BENCH_POLICY ?= --rounds 3

.PHONY: bench-policy
bench-policy: guest qemu ## busy guests over a slow link: every throttle against every way of QEMU's (twenty minutes)
	@$(CARGO) build --quiet --release --workspace --bin godwit --bin policy
	@$(CARGO) run --quiet --release --package godwit-bench --bin policy -- $(BENCH_POLICY)

# `make bench-disks BENCH_DISKS='--only side --rounds 1'` for other figures; see the program's own usage line.
BENCH_DISKS ?=

.PHONY: bench-disks
bench-disks: guest qemu ## disks that move along, beside QEMU's own way over a slow link; needs root (twenty minutes)
	@$(CARGO) build --quiet --release --package godwit-cli --bin godwit --package godwit-bench --bin disks
	@$(CARGO) run --quiet --release --package godwit-bench --bin disks -- $(BENCH_DISKS)

# `make bench-free BENCH_FREE='--rounds 1 --only idle'` for other figures; see the program's own usage line.
BENCH_FREE ?= --rounds 3

.PHONY: bench-free
bench-free: guest qemu ## guests that do not use all their memory: godwit, and QEMU with its free-page hints and with the same balloon (an hour)
	@$(CARGO) build --quiet --release --workspace --bin godwit --bin free
	@$(CARGO) run --quiet --release --package godwit-bench --bin free -- $(BENCH_FREE)

# `make bench-governor BENCH_GOVERNOR='--only hold'` for other figures; see the program's own usage line.
BENCH_GOVERNOR ?= --rounds 3

.PHONY: bench-governor
bench-governor: guest qemu ## the write governor: rates held, what it costs whom, and moves of busy guests (nine minutes)
	@$(CARGO) build --quiet --release --workspace --bin godwit --bin governor
	@$(CARGO) run --quiet --release --package godwit-bench --bin governor -- $(BENCH_GOVERNOR)

.PHONY: bench-sync
bench-sync: ## dirty-bitmap synchronisation on real KVM, and the trackers against each other (two minutes)
	@$(CARGO) run --quiet --release --package godwit-bench --bin sync

# `make bench-ping BENCH_PING='--moves 3'` for other figures; see the program's own usage line.
BENCH_PING ?= --moves 5

.PHONY: bench-ping
bench-ping: guest qemu ## what a client that pings hears of a guest that moves; needs root (two minutes)
	@$(CARGO) build --quiet --release --workspace --bin godwit --bin ping
	@$(CARGO) run --quiet --release --package godwit-bench --bin ping -- $(BENCH_PING)

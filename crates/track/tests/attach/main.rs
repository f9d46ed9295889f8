//! Attaching to a process that is like QEMU: a main thread that waits in ppoll(2), a timer whose
//! signals interrupt it, and a channel on which it answers. It looks all the time whether anything
//! of it has changed.
//!
//! Needs Linux 6.7 and the right to trace; skips aloud without.
#![allow(unsafe_code, clippy::unwrap_used)]

mod checked;
mod filter;
mod frozen;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::IntoRawFd;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use filter::Otherwise;
use frozen::Freezer;
use godwit_track::{Approach, TrackError, Way, attach};

const TARGET: &str = "GODWIT_TEST_TARGET";
const ATTACHER: &str = "GODWIT_TEST_ATTACHER";
/// For the target to answer.
const LIMIT: Duration = Duration::from_secs(60);

static ALARMS: AtomicU64 = AtomicU64::new(0);

extern "C" fn on_alarm(_: libc::c_int) {
    ALARMS.fetch_add(1, Ordering::Relaxed);
}

/// This program again, as one of the processes below, on its main thread, which the test harness
/// keeps to itself: so they begin before it does.
#[used]
#[unsafe(link_section = ".init_array")]
static ROLES: extern "C" fn() = {
    extern "C" fn begin() {
        if let Ok(how) = std::env::var(TARGET) {
            be_target(&how);
            std::process::exit(0);
        }
        if let Ok(pid) = std::env::var(ATTACHER) {
            be_attacher(pid.parse().unwrap());
        }
    }
    begin
};

/// The process that is attached to.
fn be_target(how: &str) {
    // SAFETY: a handler that adds to an atomic, signals of this process, and limits of it.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_alarm as extern "C" fn(libc::c_int) as usize;
        assert_eq!(libc::sigaction(libc::SIGALRM, &raw const action, std::ptr::null_mut()), 0);
        let files = libc::rlimit { rlim_cur: 8192, rlim_max: 8192 };
        libc::setrlimit(libc::RLIMIT_NOFILE, &raw const files);
    }
    if how.contains("timer") {
        let every = libc::timeval { tv_sec: 0, tv_usec: 1700 };
        let timer = libc::itimerval { it_interval: every, it_value: every };
        // SAFETY: reads one `itimerval`.
        unsafe { libc::setitimer(libc::ITIMER_REAL, &raw const timer, std::ptr::null_mut()) };
    }
    if let Some(way) = how.strip_prefix("filter ") {
        let device = fs::File::open("/dev/userfaultfd").map(IntoRawFd::into_raw_fd).unwrap_or(-1);
        filter::install(if way == "kill" { Otherwise::Kill } else { Otherwise::Refuse });
        println!("{device}");
    }
    println!("ready");
    let mut wrong = Vec::new();
    let mut loops = 0_u64;
    loop {
        let mut fds = [libc::pollfd { fd: 0, events: libc::POLLIN, revents: 0 }];
        let mut timeout = libc::timespec { tv_sec: 0, tv_nsec: 900_000 };
        let (result, changed) = checked::ppoll(&mut fds, &mut timeout);
        wrong.extend(changed);
        if !matches!(result, 0 | 1 | -4) {
            wrong.push(format!("ppoll returned {result}"));
        }
        loops += 1;
        // Some time in user mode, with all kinds of registers in use.
        if how.contains("busy") {
            let sum: f64 =
                (0..20_000).map(|number| f64::from(std::hint::black_box(number)).sqrt()).sum();
            if (sum - 1_885_546.969_690_999).abs() > 1.0 {
                wrong.push(format!("a sum is {sum}"));
            }
        }
        if fds[0].revents != 0 {
            let mut byte = [0];
            if std::io::stdin().read(&mut byte).unwrap() == 0 {
                return;
            }
            println!("{loops} {} {wrong:?}", ALARMS.load(Ordering::Relaxed));
        }
    }
}

/// A process that attaches again and again, to be killed.
fn be_attacher(pid: i32) -> ! {
    println!("attaching");
    loop {
        attach(pid, Approach::default()).unwrap();
    }
}

/// What comes of an attachment without CAP_SYS_ADMIN, which the kernel wants for the suspension of
/// filters.
fn attach_without_right(pid: i32, approach: Approach) -> Result<(), TrackError> {
    let work = move || {
        filter::drop_sys_admin();
        attach(pid, approach).map(drop)
    };
    std::thread::spawn(work).join().unwrap()
}

fn role(variable: &str, value: &str) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .env(variable, value)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

struct Target {
    child: Child,
    stdin: ChildStdin,
    lines: Receiver<String>,
    /// The number of its descriptor of /dev/userfaultfd.
    device: i32,
    blocked: String,
}

impl Target {
    fn start(how: &str) -> Self {
        let mut child = role(TARGET, how);
        let stdin = child.stdin.take().unwrap();
        let lines = lines_of(child.stdout.take().unwrap());
        let mut target = Self { child, stdin, lines, device: -1, blocked: String::new() };
        target.hear_until("ready");
        target.blocked = target.status("SigBlk:");
        target
    }

    fn hear_until(&mut self, wanted: &str) {
        loop {
            let line = self.lines.recv_timeout(LIMIT).unwrap();
            if line == wanted {
                return;
            }
            self.device = line.parse().unwrap();
        }
    }

    fn signal(&self, signal: i32) {
        // SAFETY: a signal for our own child.
        unsafe { assert_eq!(libc::kill(self.pid(), signal), 0) };
    }

    /// Waits until its main thread is in one of these states.
    fn wait_for_state(&self, states: &str) {
        let began = Instant::now();
        while !self.status("State:").starts_with(|state| states.contains(state)) {
            assert!(began.elapsed() < LIMIT, "it is in state {}", self.status("State:"));
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap()
    }

    fn status(&self, field: &str) -> String {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap();
        status.lines().find_map(|line| line.strip_prefix(field)).unwrap().trim().to_owned()
    }

    /// How often it went around and how often its timer came, after looking that it is as it should
    /// be.
    fn ask(&mut self) -> (u64, u64) {
        self.stdin.write_all(b".").unwrap();
        let line = self.lines.recv_timeout(LIMIT).expect("the target does not answer");
        let words: Vec<&str> = line.splitn(3, ' ').collect();
        assert_eq!(words[2], "[]");
        // While it handles a tick of its timer, that signal is blocked.
        let until = Instant::now() + LIMIT;
        while self.status("SigBlk:") != self.blocked {
            assert!(Instant::now() < until, "a signal is blocked: {}", self.status("SigBlk:"));
        }
        assert_eq!(self.status("TracerPid:"), "0");
        (words[0].parse().unwrap(), words[1].parse().unwrap())
    }

    /// Descriptors of userfaultfds that it has.
    fn userfaultfds(&self) -> usize {
        let descriptors = fs::read_dir(format!("/proc/{}/fd", self.pid())).unwrap();
        let is_one = |entry: &fs::DirEntry| {
            fs::read_link(entry.path())
                .is_ok_and(|to| to.to_string_lossy() == "anon_inode:[userfaultfd]")
        };
        descriptors.flatten().filter(is_one).count()
    }

    fn attach(&self) -> Result<Duration, TrackError> {
        attach(self.pid(), Approach::default()).map(|attachment| attachment.stopped())
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn lines_of(stdout: ChildStdout) -> Receiver<String> {
    let (sender, lines) = channel();
    std::thread::spawn(move || {
        for line in BufReader::new(stdout).lines() {
            if line.is_err() || sender.send(line.unwrap()).is_err() {
                return;
            }
        }
    });
    lines
}

/// Whether processes can be attached to here; says so aloud if not.
fn possible(what: &str) -> bool {
    match Target::start("idle").attach() {
        Err(error @ (TrackError::Kernel { .. } | TrackError::NotPermitted { .. })) => {
            // Past the test harness, which keeps what a passing test prints to itself.
            let line = format!("\nSKIPPED {what}: {error}\n");
            std::io::stderr().write_all(line.as_bytes()).unwrap();
            false
        }
        _ => true,
    }
}

#[test]
fn a_process_is_as_it_was_after_each_attachment() {
    if !possible("attaching many times") {
        return;
    }
    for how in ["idle", "timer", "timer busy"] {
        let mut target = Target::start(how);
        let before = target.ask();
        let mut stops: Vec<Duration> = (0..200).map(|_| target.attach().unwrap()).collect();
        stops.sort();
        let after = target.ask();
        println!("{how}: stopped for {:?}, at the most {:?}", stops[100], stops[199]);
        assert!(after.0 > before.0);
        assert_eq!(after.1 > before.1, how.contains("timer"));
        assert_eq!(target.userfaultfds(), 0);
    }
}

/// Kills `times` processes that attach, at moments all over what they do.
fn survive(how: &str, times: u32) {
    let mut target = Target::start(how);
    let mut rng = fastrand::Rng::with_seed(1);
    for kill in 0..times {
        let mut attacher = role(ATTACHER, &target.pid().to_string());
        let mut stdout = BufReader::new(attacher.stdout.take().unwrap());
        let mut line = String::new();
        while line.trim() != "attaching" {
            line.clear();
            assert_ne!(stdout.read_line(&mut line).unwrap(), 0, "kill {kill}: it cannot attach");
        }
        let until = Instant::now() + Duration::from_micros(rng.u64(..6000));
        while Instant::now() < until {
            std::hint::spin_loop();
        }
        attacher.kill().unwrap();
        attacher.wait().unwrap();
        target.ask();
    }
    let (before, after) = (target.ask(), target.ask());
    println!(
        "{how}: {times} kills, {} descriptors left, {before:?} {after:?}",
        target.userfaultfds()
    );
    assert!(target.attach().is_ok());
}

#[test]
fn a_hundred_kills_of_who_attaches_leave_a_process_as_it_was() {
    if possible("kills during attachment") {
        survive("timer", 50);
        survive("timer busy", 50);
    }
}

#[test]
#[ignore = "takes a quarter of a minute: make test-long"]
fn a_thousand_kills_of_who_attaches_leave_a_process_as_it_was() {
    if possible("kills during attachment") {
        survive("idle", 300);
        survive("timer", 400);
        survive("timer busy", 300);
    }
}

/// The suspension of a filter ends with who asked for it, so there are microseconds in which a kill
/// meets one that kills. This tells how many kills that is; docs/qemu.md has the figure.
#[test]
#[ignore = "takes a quarter of a minute: make test-long"]
fn hardly_a_kill_of_who_attaches_meets_a_filter_that_kills() {
    if !possible("kills during attachment to a filtered process") {
        return;
    }
    let deaths =
        (0..50).filter(|_| std::panic::catch_unwind(|| survive("filter kill", 20)).is_err());
    let deaths = deaths.count();
    println!("{deaths} of 1,000 kills");
    // On an idle machine nearly all of them meet the attach itself, and on a busy one hardly any.
    assert!(deaths <= 60, "{deaths} of 1,000");
}

#[test]
fn a_process_that_was_stopped_stays_so_and_one_that_is_continued_goes_on() {
    if !possible("attaching to a stopped process") {
        return;
    }
    let mut target = Target::start("timer");
    target.signal(libc::SIGSTOP);
    target.wait_for_state("T");
    target.attach().unwrap();
    target.wait_for_state("T");
    target.signal(libc::SIGCONT);
    target.ask();
    // Stops and continuations of others in the midst of it.
    let until = Instant::now() + Duration::from_millis(700);
    let pid = target.pid();
    let signals = std::thread::spawn(move || {
        for signal in [libc::SIGSTOP, libc::SIGCONT].into_iter().cycle() {
            // SAFETY: a signal for our own child.
            unsafe { libc::kill(pid, signal) };
            std::thread::sleep(Duration::from_micros(170));
            if signal == libc::SIGCONT && Instant::now() > until {
                return;
            }
        }
    });
    let mut times = 0;
    while !signals.is_finished() {
        target.attach().unwrap();
        times += 1;
    }
    signals.join().unwrap();
    target.ask();
    assert!(times > 20, "{times}");
    assert_eq!(target.userfaultfds(), 0);
}

#[test]
fn a_frozen_process_is_not_waited_for_and_is_let_go() {
    if !possible("attaching to a frozen process") {
        return;
    }
    for freezer in Freezer::all() {
        let mut target = Target::start("timer");
        freezer.freeze(target.pid());
        let began = Instant::now();
        let error = target.attach().unwrap_err();
        let took = began.elapsed();
        println!("{}: {error} after {took:?}", freezer.name());
        assert!(matches!(error, TrackError::Stuck { .. }), "{error}");
        // It gives up after five seconds at most; a host that is held up may take some more.
        assert!(took < Duration::from_secs(30), "{took:?}");
        assert_eq!(target.status("TracerPid:"), "0");
        freezer.thaw();
        target.ask();
        target.attach().unwrap();
        target.ask();
    }
}

#[test]
fn a_filter_that_kills_is_suspended_or_the_process_left_alone() {
    if !possible("attaching to a filtered process") {
        return;
    }
    let mut target = Target::start("filter kill");
    let refused = attach_without_right(target.pid(), Approach::default()).unwrap_err();
    assert!(matches!(refused, TrackError::Filtered { filters: 1, .. }), "{refused}");
    target.ask();
    target.attach().unwrap();
    target.ask();
    assert_eq!(target.userfaultfds(), 0);
}

#[test]
fn a_filter_that_refuses_leaves_the_device() {
    if !possible("attaching to a filtered process") {
        return;
    }
    let mut target = Target::start("filter refuse");
    let trusting = Approach { harmless_filters: 1, ..Approach::default() };
    let refused = attach_without_right(target.pid(), trusting).unwrap_err();
    assert!(matches!(refused, TrackError::Refused { .. }), "{refused}");
    target.ask();
    let by_device = Approach { way: Way::Device(target.device), ..trusting };
    attach_without_right(target.pid(), by_device).unwrap();
    target.ask();
    // Suspended, it refuses nothing.
    target.attach().unwrap();
    target.ask();
}

//! A child process whose threads spin, throttled for real. Figures are compared with others of the
//! same run.
//!
//! The child, and a process that throttles and is killed, are this test program run again:
//! [`as_a_child`] plays the part that its environment names.
#![allow(clippy::unwrap_used, unsafe_code)]

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStderr, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use godwit_vcpu_throttle::{ThrottleError, VcpuThrottle, vcpu_time};

/// A bound for what hangs, not a measure of speed.
const LIMIT: Duration = Duration::from_secs(30);
/// One test at a time: they share the processors, and compare shares of them.
static ALONE: std::sync::Mutex<()> = std::sync::Mutex::new(());

static SIGNALS: AtomicU64 = AtomicU64::new(0);

extern "C" fn count(_: libc::c_int) {
    SIGNALS.fetch_add(1, Ordering::SeqCst);
}

fn spin() -> ! {
    loop {
        std::hint::spin_loop();
    }
}

/// Not a test of its own: what the processes do that the tests start.
#[test]
fn as_a_child() {
    match std::env::var("GODWIT_THROTTLE_PART").as_deref() {
        Ok("spin") => play_spinner(),
        Ok("throttle") => play_throttler(),
        _ => {}
    }
}

/// Names its spinning threads, then answers each line with the number of signals that it got.
fn play_spinner() {
    let handler: extern "C" fn(libc::c_int) = count;
    // SAFETY: the handler only adds to an atomic number.
    unsafe { libc::signal(libc::SIGRTMIN(), handler as libc::sighandler_t) };
    let (tids_in, tids) = std::sync::mpsc::channel();
    let threads: u32 = std::env::var("GODWIT_THROTTLE_THREADS").unwrap().parse().unwrap();
    for _ in 0..threads {
        let tids_in = tids_in.clone();
        std::thread::spawn(move || {
            // SAFETY: asks for a number.
            tids_in.send(unsafe { libc::gettid() }).unwrap();
            spin()
        });
    }
    let tids: Vec<String> = (0..threads).map(|_| tids.recv().unwrap().to_string()).collect();
    let mut output = std::io::stderr();
    writeln!(output, "{}", tids.join(" ")).unwrap();
    for line in std::io::stdin().lines() {
        line.unwrap();
        writeln!(output, "{}", SIGNALS.load(Ordering::SeqCst)).unwrap();
    }
    std::process::exit(0);
}

/// Throttles what its environment names, says so, and never lets go.
fn play_throttler() {
    let numbers = std::env::var("GODWIT_THROTTLE_THREADS").unwrap();
    let numbers: Vec<i32> = numbers.split(' ').map(|number| number.parse().unwrap()).collect();
    let mut throttle = VcpuThrottle::new(numbers[0], &numbers[1..]);
    throttle.set(0.99).unwrap();
    eprintln!("throttled");
    std::thread::sleep(LIMIT);
}

/// A process of this program in another part. Dropping it kills it.
struct Part {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStderr>,
}

impl Part {
    fn start(part: &str, threads: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "as_a_child", "--nocapture", "--quiet"])
            .env("GODWIT_THROTTLE_PART", part)
            .env("GODWIT_THROTTLE_THREADS", threads)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let input = child.stdin.take();
        let output = BufReader::new(child.stderr.take().unwrap());
        Self { child, input, output }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    fn ask(&mut self) -> u64 {
        writeln!(self.input.as_mut().unwrap(), "signals").unwrap();
        self.line().parse().unwrap()
    }

    fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap()
    }

    fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        self.kill();
    }
}

/// For how much of the time threads ran. Others keep the processors busy, too, so it is known
/// between two bounds: the time on a processor, and that and the wait for one.
#[derive(Clone, Copy, Debug)]
struct Speed {
    least: f64,
    most: f64,
}

/// A process with spinning threads.
struct Spinner {
    part: Part,
    tids: Vec<i32>,
}

impl Spinner {
    fn start(threads: u32) -> Self {
        let mut part = Part::start("spin", &threads.to_string());
        let tids = part.line().split(' ').map(|tid| tid.parse().unwrap()).collect();
        Self { part, tids }
    }

    fn throttle(&self) -> VcpuThrottle {
        VcpuThrottle::new(self.part.pid(), &self.tids)
    }

    /// What the threads do for a `wall` of time.
    fn speed(&self, wall: Duration) -> Speed {
        // Times in nanoseconds, on a CPU and waiting for one
        // (Documentation/scheduler/sched-stats.rst).
        let word = |tid: &i32, number: usize| {
            let path = format!("/proc/{}/task/{tid}/schedstat", self.part.pid());
            let text = std::fs::read_to_string(path).unwrap();
            text.split(' ').nth(number).unwrap().parse::<f64>().unwrap()
        };
        let sum = |number| self.tids.iter().map(|tid| word(tid, number)).sum::<f64>();
        let (began, ran, waited) = (Instant::now(), sum(0), sum(1));
        std::thread::sleep(wall);
        let (ran, waited) = (sum(0) - ran, sum(1) - waited);
        let all = began.elapsed().as_nanos() as f64 * self.tids.len() as f64;
        Speed { least: ran / all, most: (ran + waited) / all }
    }

    /// A line of `/proc/PID/task/TID/status` of each thread.
    fn status(&self, name: &str) -> Vec<String> {
        let field = |tid: &i32| {
            let path = format!("/proc/{}/task/{tid}/status", self.part.pid());
            let text = std::fs::read_to_string(path).unwrap();
            text.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim().to_owned()
        };
        self.tids.iter().map(field).collect()
    }

    /// The processes that trace the threads; the kernel names the threads that do.
    fn tracers(&self) -> Vec<String> {
        let process = |thread: String| {
            let status =
                std::fs::read_to_string(format!("/proc/{thread}/status")).unwrap_or_default();
            let process = status.lines().find_map(|line| line.strip_prefix("Tgid:"));
            process.map_or(thread, |process| process.trim().to_owned())
        };
        self.status("TracerPid:").into_iter().map(process).collect()
    }

    /// Sends a signal that queues to a thread.
    fn signal(&self, tid: i32, signal: libc::c_int) {
        // SAFETY: tgkill takes three numbers.
        let result = unsafe { libc::syscall(libc::SYS_tgkill, self.part.pid(), tid, signal) };
        assert_eq!(result, 0);
    }

    /// Sends a signal to the process.
    fn signal_all(&self, signal: libc::c_int) {
        // SAFETY: kill takes two numbers.
        assert_eq!(unsafe { libc::kill(self.part.pid(), signal) }, 0);
    }
}

/// Waits until `happened`; whether it has within [`LIMIT`].
fn comes_true(mut happened: impl FnMut() -> bool) -> bool {
    let until = Instant::now() + LIMIT;
    while Instant::now() < until {
        if happened() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    false
}

const WHILE: Duration = Duration::from_millis(600);

#[test]
fn threads_run_for_the_rest_of_the_time_and_then_freely() {
    let _alone = ALONE.lock();
    let spinner = Spinner::start(1);
    let mut throttle = spinner.throttle();
    let mut speed = |share| {
        throttle.set(share).unwrap();
        spinner.speed(WHILE)
    };
    let speeds = [0.0, 0.2, 0.5, 0.9, 0.99, 0.0].map(&mut speed);
    println!("{speeds:.3?}");
    let [free, most, half, tenth, hundredth, freed] = speeds;
    assert!(free.most > 0.8 && freed.most > 0.8);
    assert!(most.most > 0.6 && most.least < 0.95, "{most:?}");
    assert!(half.most > 0.35 && half.least < 0.6, "{half:?}");
    assert!(tenth.most > 0.05 && tenth.least < 0.2, "{tenth:?}");
    assert!(hundredth.most > 0.002 && hundredth.least < 0.06, "{hundredth:?}");
    assert_eq!(spinner.tracers(), ["0"]);
}

#[test]
fn all_threads_are_stopped_and_continued_together() {
    let _alone = ALONE.lock();
    let spinner = Spinner::start(4);
    let mut throttle = spinner.throttle();
    throttle.set(0.5).unwrap();
    let own = std::process::id().to_string();
    assert_eq!(spinner.tracers(), [own.as_str(); 4]);
    let before = vcpu_time(spinner.part.pid(), &spinner.tids).unwrap();
    let looks = 300;
    let (mut each, mut all) = ([0_u32; 4], 0_u32);
    for number in 0..looks {
        let stopped: Vec<bool> =
            spinner.status("State:").iter().map(|state| state.starts_with('t')).collect();
        each.iter_mut().zip(&stopped).for_each(|(each, &stopped)| *each += u32::from(stopped));
        all += u32::from(stopped.iter().all(|&stopped| stopped));
        // Not in step with the period.
        std::thread::sleep(Duration::from_micros(number * 1733 % 7000));
    }
    // Were each stopped for itself, all would be seen stopped as often as chance has it.
    let by_chance: f64 = each.iter().map(|&each| f64::from(each) / looks as f64).product();
    let together = f64::from(all) / looks as f64;
    // Read before the throttle's own look: what the threads run between the two is not its lie.
    let after = vcpu_time(spinner.part.pid(), &spinner.tids).unwrap();
    let measures = throttle.measures();
    println!(
        "all stopped {together:.3}, by chance {by_chance:.3}, {measures:?}, {:?}",
        measures.ran_share()
    );
    assert!(together > by_chance * 2.5, "{together} {by_chance} {each:?}");
    assert!(measures.ran.unwrap() >= after - before);
    assert!(measures.ran_share().unwrap() < 0.6, "{measures:?}");
    assert!(measures.longest_stop >= Duration::from_micros(4500), "{measures:?}");
    throttle.set(0.0).unwrap();
    assert_eq!(spinner.tracers(), ["0"; 4]);
    assert!(throttle.measures().longest_stop >= measures.longest_stop);
}

#[test]
fn a_throttler_that_is_killed_leaves_nobody_slow() {
    let _alone = ALONE.lock();
    let spinner = Spinner::start(2);
    let numbers = format!("{} {} {}", spinner.part.pid(), spinner.tids[0], spinner.tids[1]);
    let mut throttler = Part::start("throttle", &numbers);
    assert_eq!(throttler.line(), "throttled");
    let slow = spinner.speed(WHILE);

    throttler.kill();

    // The process is gone for its parent when its last thread has let go.
    assert_eq!(spinner.tracers(), ["0"; 2]);
    let after = spinner.speed(WHILE);
    println!("throttled {slow:?}, after {after:?}");
    assert!(slow.least < 0.06 && after.most > 0.8, "{slow:?} {after:?}");
    assert!(spinner.status("State:").iter().all(|state| state.starts_with('R')));
}

#[test]
fn no_signal_is_lost_or_doubled() {
    let _alone = ALONE.lock();
    let mut spinner = Spinner::start(2);
    let mut throttle = spinner.throttle();
    throttle.set(0.9).unwrap();
    for number in 0..400 {
        spinner.signal(spinner.tids[number % 2], libc::SIGRTMIN());
        // In and out of all phases of the period, and now and then across a release.
        std::thread::sleep(Duration::from_micros(700));
        if number % 40 == 0 {
            throttle.set(0.0).unwrap();
            throttle.set(0.9).unwrap();
        }
    }
    // Nobody lets go: what is pending gets through a throttle.
    assert!(comes_true(|| spinner.part.ask() >= 400));
    assert_eq!(spinner.part.ask(), 400);
    assert!(throttle.set(0.5).is_ok());
}

#[test]
fn a_stopped_process_stays_stopped_and_goes_on_when_told() {
    let _alone = ALONE.lock();
    let spinner = Spinner::start(2);
    let mut throttle = spinner.throttle();
    throttle.set(0.5).unwrap();
    spinner.signal_all(libc::SIGSTOP);
    // To enter a stop, and to change it for one of tracing, takes the thread microseconds in the
    // kernel.
    let stands_still = || spinner.speed(WHILE).least < 0.001;
    assert!(comes_true(stands_still));
    assert!(stands_still());
    // Letting go does not wake it either.
    throttle.set(0.0).unwrap();
    assert_eq!(spinner.tracers(), ["0"; 2]);
    assert!(stands_still());
    throttle.set(0.5).unwrap();
    assert!(stands_still());

    spinner.signal_all(libc::SIGCONT);

    assert!(comes_true(|| spinner.speed(Duration::from_millis(50)).least > 0.0));
    assert!(throttle.set(0.99).is_ok());
    assert!(spinner.speed(WHILE).least > 0.0);
}

#[test]
fn the_end_of_the_process_is_reported_once() {
    let _alone = ALONE.lock();
    let mut spinner = Spinner::start(2);
    let mut throttle = spinner.throttle();
    throttle.set(0.99).unwrap();
    // Its main thread can be asked although the others stand still.
    assert_eq!(spinner.part.ask(), 0);
    spinner.part.kill();
    assert!(comes_true(|| matches!(throttle.set(0.99), Err(ThrottleError::Gone { .. }))));
    assert!(throttle.set(0.0).is_ok());
    assert!(matches!(throttle.set(0.5), Err(ThrottleError::Gone { .. })));
}

#[test]
fn threads_can_be_changed_while_they_are_throttled() {
    let _alone = ALONE.lock();
    let spinner = Spinner::start(2);
    let own = std::process::id().to_string();
    let mut throttle = VcpuThrottle::new(spinner.part.pid(), &spinner.tids[..1]);
    throttle.set(0.9).unwrap();
    assert_eq!(spinner.tracers(), [own.as_str(), "0"]);
    throttle.set_threads(&spinner.tids).unwrap();
    assert_eq!(spinner.tracers(), [own.as_str(), own.as_str()]);
    throttle.set_threads(&spinner.tids[1..]).unwrap();
    assert_eq!(spinner.tracers(), ["0", own.as_str()]);
    // A thread that is gone does not keep the others from being throttled.
    throttle.set_threads(&[spinner.tids[0], i32::MAX - 1]).unwrap();
    assert_eq!(spinner.tracers(), [own.as_str(), "0"]);
    drop(throttle);
    assert_eq!(spinner.tracers(), ["0", "0"]);
}

#[test]
fn what_cannot_be_throttled_is_told_and_left_alone() {
    let _alone = ALONE.lock();
    let spinner = Spinner::start(2);
    let mut first = VcpuThrottle::new(spinner.part.pid(), &spinner.tids[1..]);
    first.set(0.5).unwrap();
    let own = std::process::id().to_string();
    // The second of the two has a tracer; the first must not be left traced.
    let error = spinner.throttle().set(0.5).unwrap_err();
    assert!(matches!(error, ThrottleError::Traced { .. }), "{error}");
    assert!(error.to_string().contains("detach that first"), "{error}");
    assert_eq!(spinner.tracers(), ["0", own.as_str()]);
    let own_pid = spinner.part.pid();
    // A thread of another process is never touched.
    let error = VcpuThrottle::new(own_pid, &[1]).set(0.5).unwrap_err();
    assert!(matches!(error, ThrottleError::Gone { .. }), "{error}");
    // A share out of range changes nothing.
    assert!(matches!(first.set(1.0), Err(ThrottleError::Share(_))));
    assert_eq!(spinner.tracers(), ["0", own.as_str()]);
}

#[test]
fn short_slices_stop_shortly() {
    let _alone = ALONE.lock();
    let spinner = Spinner::start(1);
    let mut throttle = spinner.throttle();
    throttle.set_short(true).unwrap();
    throttle.set(0.99).unwrap();
    let short = spinner.speed(WHILE);
    println!("{short:?}, {:?}", throttle.measures());
    assert!(short.most > 0.03 && short.least < 0.35, "{short:?}");
    throttle.set_short(false).unwrap();
    assert!(spinner.speed(WHILE).least < short.most);
}

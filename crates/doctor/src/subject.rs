//! The process on which things are tried: it has a little memory of its own, and writes to it when
//! it is told to.
//!
//! It is this program once more, started with [`COMMAND`]. It speaks by lines: first where its
//! memory is and under which number it holds /dev/userfaultfd, then a word for each page that it
//! has written.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

use godwit_units::{PAGE_SIZE, PageBuffer, PageCount};

/// The command by which a program becomes a subject: it then calls [`stand`].
pub const COMMAND: &str = "doctor-subject";
/// How much memory it has.
pub(crate) const PAGES: PageCount = PageCount(64);
/// What each page of it is full of at first.
pub(crate) const FILLED: u8 = 0x5a;
/// A subject that does not answer by then is stuck.
const LIMIT: Duration = Duration::from_secs(5);

/// A subject, which ends when this is dropped.
///
/// ```no_run
/// use godwit_doctor::Subject;
///
/// let mut subject = Subject::start(&std::env::current_exe()?)?;
/// subject.write(3)?;
/// println!("process {} has written to its fourth page", subject.pid());
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct Subject {
    child: Child,
    orders: ChildStdin,
    answers: Receiver<String>,
    address: u64,
    device: Option<i32>,
}

impl Subject {
    /// Starts `program` as one.
    ///
    /// # Errors
    /// When it cannot be started, or does not say where its memory is.
    pub fn start(program: &Path) -> io::Result<Self> {
        let mut child = Command::new(program)
            .arg(COMMAND)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let (orders, output) = child.stdin.take().zip(child.stdout.take()).ok_or_else(stuck)?;
        let (said, answers) = mpsc::channel();
        let hear = move || {
            let lines = BufReader::new(output).lines().map_while(Result::ok);
            // Nobody asks any more once this fails.
            let _ = lines.map(|line| said.send(line)).find(Result::is_err);
        };
        std::thread::Builder::new().name("subject".to_owned()).spawn(hear)?;
        let mut subject = Self { child, orders, answers, address: 0, device: None };
        let first = subject.hear()?;
        let mut words = first.split(' ');
        let mut number = || words.next().and_then(|word| word.parse::<i64>().ok());
        let (address, device) = number().zip(number()).ok_or_else(stuck)?;
        subject.address = address.cast_unsigned();
        subject.device = i32::try_from(device).ok().filter(|device| *device >= 0);
        Ok(subject)
    }

    /// Its process.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.child.id().cast_signed()
    }

    /// Where its memory is.
    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    /// Under which number it holds /dev/userfaultfd, if it may open that.
    pub(crate) fn device(&self) -> Option<i32> {
        self.device
    }

    /// Has it write to its page `number`.
    ///
    /// # Errors
    /// When it has ended, or does not answer within five seconds.
    pub fn write(&mut self, number: u64) -> io::Result<()> {
        writeln!(self.orders, "{number}")?;
        self.hear().map(drop)
    }

    fn hear(&self) -> io::Result<String> {
        self.answers.recv_timeout(LIMIT).map_err(|_| stuck())
    }
}

impl Drop for Subject {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn stuck() -> io::Error {
    io::Error::other("the process that was started to try it on does not answer")
}

/// Is a subject, until `orders` end.
///
/// # Errors
/// When nobody hears it any more.
///
/// ```
/// let mut said = Vec::new();
/// godwit_doctor::stand("3\n9\n".as_bytes(), &mut said)?;
/// assert_eq!(String::from_utf8_lossy(&said).lines().count(), 3);
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn stand(orders: impl BufRead, mut answers: impl Write) -> io::Result<()> {
    let page = usize::try_from(PAGE_SIZE).unwrap_or(usize::MAX);
    let mut memory = PageBuffer::new(PAGES);
    memory.fill(FILLED);
    let device = File::open("/dev/userfaultfd");
    let number = device.as_ref().map_or(-1, |device| device.as_raw_fd());
    writeln!(answers, "{} {number}", memory.as_ptr().addr())?;
    answers.flush()?;
    for (count, line) in orders.lines().enumerate() {
        let number: usize = line?.trim().parse().map_err(io::Error::other)?;
        let at = number % (memory.len() / page) * page;
        memory[at] = count.to_le_bytes()[0];
        // Whoever looks from outside is unknown to the compiler.
        std::hint::black_box(&mut memory);
        writeln!(answers, "written")?;
        answers.flush()?;
    }
    Ok(())
}

//! The client: requests are asked for tickets, and their answers taken for these, in whatever
//! order.

use std::collections::VecDeque;
use std::io::{BufReader, Write};
use std::os::unix::net::UnixStream;

use crate::error::NbdError;
use crate::handshake::{Export, Wish, negotiate};
use crate::pending::{Pending, Stretch};
use crate::protocol::{Command, REQUEST, REQUEST_DF};
use crate::reply::{Bad, take_one};
use crate::stream::{Address, Stream};

/// How many requests may be under way; QEMU works at 16 of a client at a time (`MAX_NBD_REQUESTS`).
pub const DEPTH: usize = 16;
/// The longest read or write that this client makes.
pub const REQUEST_MAX: u32 = 1 << 20;
/// The longest stretch whose status is asked for, or that is made zero, in one request.
pub const STRETCH_MAX: u32 = 1 << 31;
const BUFFER: usize = 64 << 10;

/// What a request is known by until its answer is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket(u64);

/// A connection to one export.
#[derive(Debug)]
pub struct Client {
    stream: BufReader<Stream>,
    name: String,
    export: Export,
    pending: VecDeque<Pending>,
    /// Buffers of reads that were taken.
    spare: Vec<Vec<u8>>,
    next_cookie: u64,
    /// After a failure of the connection nothing that comes can be trusted.
    broken: bool,
}

impl Client {
    /// Connects to the server at `address` and agrees with it on `wish`.
    ///
    /// # Errors
    /// When nobody listens, or the server has no such export, or cannot do what is needed.
    pub fn connect(address: &Address, wish: &Wish) -> Result<Self, NbdError> {
        let stream = Stream::connect(address).map_err(|source| NbdError::Connect {
            export: wish.export.clone(),
            address: address.to_string(),
            source,
        })?;
        Self::over(stream, wish)
    }

    /// The same over a socket that is connected already.
    ///
    /// # Errors
    /// As [`Self::connect`].
    pub fn over_unix(stream: UnixStream, wish: &Wish) -> Result<Self, NbdError> {
        let stream = Stream::unix(stream).map_err(|source| NbdError::Io {
            export: wish.export.clone(),
            during: "setting a time limit",
            source,
        })?;
        Self::over(stream, wish)
    }

    fn over(stream: Stream, wish: &Wish) -> Result<Self, NbdError> {
        let mut stream = BufReader::with_capacity(BUFFER, stream);
        let export = negotiate(&mut stream, wish)?;
        if wish.ahead {
            stream.get_mut().read_ahead().map_err(|source| NbdError::Io {
                export: wish.export.clone(),
                during: "starting to read ahead",
                source,
            })?;
        }
        Ok(Self {
            stream,
            name: wish.export.clone(),
            export,
            pending: VecDeque::new(),
            spare: Vec::new(),
            next_cookie: 0,
            broken: false,
        })
    }

    /// What was agreed on.
    #[must_use]
    pub fn export(&self) -> &Export {
        &self.export
    }

    /// How many requests were asked and not yet taken.
    #[must_use]
    pub fn under_way(&self) -> usize {
        self.pending.len()
    }

    /// Asks for `length` bytes from `offset` on.
    ///
    /// # Errors
    /// When the connection fails.
    ///
    /// # Panics
    /// When [`DEPTH`] requests are under way, or the bytes are more than [`REQUEST_MAX`] or not in
    /// the export: mistakes of the caller.
    pub fn ask_read(&mut self, offset: u64, length: u32) -> Result<Ticket, NbdError> {
        assert!(length <= REQUEST_MAX, "a read of {length} bytes");
        let mut data = self.spare.pop().unwrap_or_default();
        data.clear();
        data.resize(length as usize, 0);
        self.ask(Command::Read, offset, length, data, Vec::new(), &[])
    }

    /// Waits for a read and fills `bytes` with it.
    ///
    /// # Errors
    /// When it failed, or the connection did.
    ///
    /// # Panics
    /// When the ticket is not of a read of that many bytes that is under way.
    pub fn take_read(&mut self, ticket: Ticket, bytes: &mut [u8]) -> Result<(), NbdError> {
        let request = self.take(ticket, &[Command::Read])?;
        bytes.copy_from_slice(&request.data);
        self.spare.push(request.data);
        Ok(())
    }

    /// Asks for `bytes` to be written at `offset`.
    ///
    /// # Errors
    /// As [`Self::ask_read`].
    ///
    /// # Panics
    /// As [`Self::ask_read`].
    pub fn ask_write(&mut self, offset: u64, bytes: &[u8]) -> Result<Ticket, NbdError> {
        let length = u32::try_from(bytes.len()).ok().filter(|length| *length <= REQUEST_MAX);
        let length = length.unwrap_or_else(|| panic!("a write of {} bytes", bytes.len()));
        self.ask(Command::Write, offset, length, Vec::new(), Vec::new(), bytes)
    }

    /// Asks for `length` bytes from `offset` on to read as zeros, with a hole where that is
    /// possible (NBD_CMD_FLAG_NO_HOLE is not set).
    ///
    /// # Errors
    /// As [`Self::ask_read`].
    ///
    /// # Panics
    /// When [`DEPTH`] requests are under way, or the bytes are more than [`STRETCH_MAX`] or not in
    /// the export.
    pub fn ask_zeros(&mut self, offset: u64, length: u32) -> Result<Ticket, NbdError> {
        assert!(length <= STRETCH_MAX, "a stretch of {length} bytes");
        self.ask(Command::WriteZeroes, offset, length, Vec::new(), Vec::new(), &[])
    }

    /// Asks for everything that was written and taken to be put on stable storage; does nothing
    /// where the server has no such request.
    ///
    /// # Errors
    /// As [`Self::ask_read`].
    ///
    /// # Panics
    /// When [`DEPTH`] requests are under way.
    pub fn ask_flush(&mut self) -> Result<Option<Ticket>, NbdError> {
        if !self.export.can_flush() {
            return Ok(None);
        }
        self.ask(Command::Flush, 0, 0, Vec::new(), Vec::new(), &[]).map(Some)
    }

    /// Waits until a write, zeros or a flush is done.
    ///
    /// # Errors
    /// When it failed, or the connection did.
    ///
    /// # Panics
    /// When the ticket is not of such a request that is under way.
    pub fn take_done(&mut self, ticket: Ticket) -> Result<(), NbdError> {
        self.take(ticket, &[Command::Write, Command::WriteZeroes, Command::Flush]).map(drop)
    }

    /// Asks what the contexts say of `length` bytes from `offset` on.
    ///
    /// # Errors
    /// As [`Self::ask_read`].
    ///
    /// # Panics
    /// As [`Self::ask_zeros`]; when no context was wished for.
    pub fn ask_status(&mut self, offset: u64, length: u32) -> Result<Ticket, NbdError> {
        assert!(length <= STRETCH_MAX, "a stretch of {length} bytes");
        assert!(!self.export.contexts.is_empty(), "no context was agreed on");
        let status = vec![None; self.export.contexts.len()];
        self.ask(Command::BlockStatus, offset, length, Vec::new(), status, &[])
    }

    /// Waits for a status: for each context, in the order in which they were wished for, stretches
    /// without gaps from the offset on. They may end before the end of the request, but not before
    /// its first byte.
    ///
    /// # Errors
    /// When it failed, or the connection did.
    ///
    /// # Panics
    /// When the ticket is not of a status that is under way.
    pub fn take_status(&mut self, ticket: Ticket) -> Result<Vec<Vec<Stretch>>, NbdError> {
        let request = self.take(ticket, &[Command::BlockStatus])?;
        Ok(request.status.into_iter().flatten().collect())
    }

    fn ask(
        &mut self,
        command: Command,
        offset: u64,
        length: u32,
        data: Vec<u8>,
        status: Vec<Option<Vec<Stretch>>>,
        payload: &[u8],
    ) -> Result<Ticket, NbdError> {
        assert!(self.pending.len() < DEPTH, "more than {DEPTH} requests under way");
        let end = offset.checked_add(u64::from(length));
        let within = end.is_some_and(|end| end <= self.export.size);
        assert!(within, "{length} bytes at {offset:#x} of export '{}' are not in it", self.name);
        self.check()?;
        let cookie = self.next_cookie;
        self.next_cookie += 1;
        self.pending.push_back(Pending {
            cookie,
            command,
            offset,
            length,
            data,
            filled: 0,
            status,
            complaint: None,
            done: false,
        });
        // QEMU looks for holes in a read that may be answered in parts, and ends the connection
        // when such a read fails (nbd_co_send_sparse_read in nbd/server.c). One in a single part is
        // answered with the error.
        let whole = command == Command::Read && self.export.can_answer_in_one();
        let flags = if whole { REQUEST_DF } else { 0 };
        let head = head(flags, command, cookie, offset, length);
        let stream = self.stream.get_mut();
        let sent = stream.write_all(&head).and_then(|()| stream.write_all(payload));
        sent.map_err(|source| {
            self.broken = true;
            NbdError::Io { export: self.name.clone(), during: command.name(), source }
        })?;
        Ok(Ticket(cookie))
    }

    /// Waits until the request is answered, and takes it out.
    fn take(&mut self, ticket: Ticket, commands: &[Command]) -> Result<Pending, NbdError> {
        let place = self.pending.iter().position(|request| request.cookie == ticket.0);
        let place = place.filter(|place| commands.contains(&self.pending[*place].command));
        let place =
            place.unwrap_or_else(|| panic!("{ticket:?} is not of a request to {commands:?}"));
        let command = self.pending[place].command;
        self.check()?;
        // Nothing is taken out meanwhile, so the place stays.
        while !self.pending[place].done {
            let taken = take_one(&mut self.stream, &mut self.pending, &self.export.contexts);
            taken.map_err(|bad| self.give_up(command, bad))?;
        }
        let Some(request) = self.pending.remove(place) else { return Err(self.gone(command)) };
        if let Some(complaint) = request.complaint {
            return Err(NbdError::Failed {
                export: self.name.clone(),
                command: command.name(),
                offset: complaint.at.unwrap_or(request.offset),
                length: request.length.into(),
                errno: complaint.errno,
                words: complaint.words,
            });
        }
        if let Some(lack) = request.lack() {
            return Err(self.give_up(command, Bad::Protocol(lack)));
        }
        Ok(request)
    }

    fn give_up(&mut self, command: Command, bad: Bad) -> NbdError {
        self.broken = true;
        let export = self.name.clone();
        match bad {
            Bad::Io(source) => NbdError::Io { export, during: command.name(), source },
            Bad::Protocol(what) => NbdError::Protocol { export, what },
        }
    }

    fn check(&self) -> Result<(), NbdError> {
        if self.broken { Err(self.gone(Command::Disconnect)) } else { Ok(()) }
    }

    fn gone(&self, command: Command) -> NbdError {
        let source = std::io::ErrorKind::NotConnected.into();
        NbdError::Io { export: self.name.clone(), during: command.name(), source }
    }
}

impl Drop for Client {
    /// A server that is told does not log a connection that broke.
    fn drop(&mut self) {
        if !self.broken {
            let _ = self.stream.get_mut().write_all(&head(
                0,
                Command::Disconnect,
                self.next_cookie,
                0,
                0,
            ));
        }
    }
}

/// A request (proto, "Request message"). NBD_CMD_FLAG_NO_HOLE is never set: a stretch of zeros may
/// become a hole.
fn head(flags: u16, command: Command, cookie: u64, offset: u64, length: u32) -> [u8; 28] {
    let mut head = [0; 28];
    head[0..4].copy_from_slice(&REQUEST.to_be_bytes());
    head[4..6].copy_from_slice(&flags.to_be_bytes());
    head[6..8].copy_from_slice(&(command as u16).to_be_bytes());
    head[8..16].copy_from_slice(&cookie.to_be_bytes());
    head[16..24].copy_from_slice(&offset.to_be_bytes());
    head[24..28].copy_from_slice(&length.to_be_bytes());
    head
}

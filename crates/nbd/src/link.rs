//! A connection that is made anew once when it breaks, with all that was under way asked again.
//!
//! That is safe: reads and a status change nothing, and writing the same bytes or zeros once more
//! ends in the same state, as long as the caller has no two writes to the same bytes under way. A
//! flush is asked again as well: what a server that has gone had not yet put on stable storage is
//! not known to the next one, so a flush vouches only for a server that is still the same process.

use std::collections::VecDeque;

use crate::client::{Client, DEPTH, Ticket};
use crate::error::NbdError;
use crate::handshake::{Export, Wish};
use crate::pending::Stretch;
use crate::stream::Address;

/// What a request to a [`Link`] is known by until its answer is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asked(u64);

#[derive(Debug)]
enum Request {
    Read { offset: u64, length: u32 },
    Write { offset: u64, bytes: Vec<u8> },
    Zeros { offset: u64, length: u32 },
    Status { offset: u64, length: u32 },
    Flush,
}

impl Request {
    /// Asks `client`; `None` for a flush where there is none.
    fn ask(&self, client: &mut Client) -> Result<Option<Ticket>, NbdError> {
        match self {
            Self::Read { offset, length } => client.ask_read(*offset, *length).map(Some),
            Self::Write { offset, bytes } => client.ask_write(*offset, bytes).map(Some),
            Self::Zeros { offset, length } => client.ask_zeros(*offset, *length).map(Some),
            Self::Status { offset, length } => client.ask_status(*offset, *length).map(Some),
            Self::Flush => client.ask_flush(),
        }
    }
}

#[derive(Debug)]
struct Waiting {
    number: u64,
    request: Request,
    ticket: Option<Ticket>,
}

/// A connection to one export that is made anew once when it breaks; once more only after an answer
/// came over the new one.
#[derive(Debug)]
pub struct Link {
    address: Address,
    wish: Wish,
    client: Client,
    waiting: VecDeque<Waiting>,
    next: u64,
    /// Whether an answer has come over this connection.
    proven: bool,
    spare: Vec<Vec<u8>>,
}

impl Link {
    /// Connects to the server at `address` and agrees with it on `wish`.
    ///
    /// # Errors
    /// As [`Client::connect`].
    pub fn connect(address: Address, wish: Wish) -> Result<Self, NbdError> {
        let client = Client::connect(&address, &wish)?;
        let (waiting, spare) = (VecDeque::new(), Vec::new());
        Ok(Self { address, wish, client, waiting, next: 0, proven: true, spare })
    }

    /// What was agreed on.
    #[must_use]
    pub fn export(&self) -> &Export {
        self.client.export()
    }

    /// How many requests were asked and not yet taken; at most [`DEPTH`].
    #[must_use]
    pub fn under_way(&self) -> usize {
        self.waiting.len()
    }

    /// As [`Client::ask_read`].
    ///
    /// # Errors
    /// When the connection fails, and again.
    pub fn ask_read(&mut self, offset: u64, length: u32) -> Result<Asked, NbdError> {
        self.ask(Request::Read { offset, length })
    }

    /// As [`Client::ask_write`]. Keeps a copy of `bytes` until the answer is taken.
    ///
    /// # Errors
    /// As [`Self::ask_read`].
    pub fn ask_write(&mut self, offset: u64, bytes: &[u8]) -> Result<Asked, NbdError> {
        let mut copy = self.spare.pop().unwrap_or_default();
        copy.clear();
        copy.extend_from_slice(bytes);
        self.ask(Request::Write { offset, bytes: copy })
    }

    /// As [`Client::ask_zeros`].
    ///
    /// # Errors
    /// As [`Self::ask_read`].
    pub fn ask_zeros(&mut self, offset: u64, length: u32) -> Result<Asked, NbdError> {
        self.ask(Request::Zeros { offset, length })
    }

    /// As [`Client::ask_status`].
    ///
    /// # Errors
    /// As [`Self::ask_read`].
    pub fn ask_status(&mut self, offset: u64, length: u32) -> Result<Asked, NbdError> {
        self.ask(Request::Status { offset, length })
    }

    /// As [`Client::ask_flush`]; one that does nothing is done at once.
    ///
    /// # Errors
    /// As [`Self::ask_read`].
    pub fn ask_flush(&mut self) -> Result<Asked, NbdError> {
        self.ask(Request::Flush)
    }

    /// As [`Client::take_read`].
    ///
    /// # Errors
    /// When it failed, or the connection did, and again.
    pub fn take_read(&mut self, asked: Asked, bytes: &mut [u8]) -> Result<(), NbdError> {
        self.take(asked, |client, ticket| client.take_read(ticket, bytes))
    }

    /// As [`Client::take_done`].
    ///
    /// # Errors
    /// As [`Self::take_read`].
    pub fn take_done(&mut self, asked: Asked) -> Result<(), NbdError> {
        self.take(asked, Client::take_done)
    }

    /// As [`Client::take_status`], of the first context.
    ///
    /// # Errors
    /// As [`Self::take_read`].
    pub fn take_status(&mut self, asked: Asked) -> Result<Vec<Stretch>, NbdError> {
        let contexts = self.take(asked, Client::take_status)?;
        Ok(contexts.into_iter().next().unwrap_or_default())
    }

    fn ask(&mut self, request: Request) -> Result<Asked, NbdError> {
        assert!(self.waiting.len() < DEPTH, "more than {DEPTH} requests under way");
        let number = self.next;
        self.next += 1;
        let ticket = request.ask(&mut self.client);
        self.waiting.push_back(Waiting { number, request, ticket: None });
        match ticket {
            Ok(ticket) => {
                if let Some(waiting) = self.waiting.back_mut() {
                    waiting.ticket = ticket;
                }
            }
            Err(error) => self.anew(error)?,
        }
        Ok(Asked(number))
    }

    fn take<T: Default>(
        &mut self,
        asked: Asked,
        mut take: impl FnMut(&mut Client, Ticket) -> Result<T, NbdError>,
    ) -> Result<T, NbdError> {
        let place = self.waiting.iter().position(|waiting| waiting.number == asked.0);
        let place = place.unwrap_or_else(|| panic!("{asked:?} is not under way"));
        let answer = loop {
            let Some(ticket) = self.waiting[place].ticket else { break Ok(T::default()) };
            match take(&mut self.client, ticket) {
                Err(error) if error.is_of_connection() => self.anew(error)?,
                answer => {
                    self.proven = true;
                    break answer;
                }
            }
        };
        if let Some(Waiting { request: Request::Write { bytes, .. }, .. }) =
            self.waiting.remove(place)
        {
            self.spare.push(bytes);
        }
        answer
    }

    /// Connects again after `error` and asks for everything that is under way.
    fn anew(&mut self, error: NbdError) -> Result<(), NbdError> {
        if !error.is_of_connection() || !std::mem::take(&mut self.proven) {
            return Err(error);
        }
        let size = self.client.export().size;
        self.client = Client::connect(&self.address, &self.wish)?;
        if self.client.export().size != size {
            let what =
                format!("its size has changed from {size} to {} bytes", self.client.export().size);
            return Err(NbdError::Unfit { export: self.wish.export.clone(), what });
        }
        for waiting in &mut self.waiting {
            waiting.ticket = waiting.request.ask(&mut self.client)?;
        }
        Ok(())
    }
}

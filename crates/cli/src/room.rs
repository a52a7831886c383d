//! A page of limited size: what does not fit is counted, and the page says so.

use crate::units::{counted, plural};
use std::collections::BTreeMap;

/// The bytes that are free where something opens, for the line about what it leaves out and for a tag that closes it.
const CLOSING: usize = 200;

/// A text that grows up to a limit.
pub struct Room {
    text: String,
    /// The bytes of the whole page.
    limit: usize,
    /// The bytes at which the present part ends.
    end: usize,
    left_out: BTreeMap<&'static str, usize>,
}

impl Room {
    /// A page of so many bytes at most.
    pub fn new(limit: usize) -> Self {
        Room { text: String::new(), limit, end: limit, left_out: BTreeMap::new() }
    }

    /// Begins a part, which ends at this share of the page.
    pub fn part(&mut self, end: f64) {
        self.end = (self.limit as f64 * end.clamp(0.0, 1.0)) as usize;
    }

    /// Adds what closes or opens something: it is short, and there is room for it beyond the end of each part.
    pub fn mark(&mut self, text: &str) {
        self.text += text;
    }

    fn fits(&self, bytes: usize) -> bool {
        self.text.len() + bytes <= self.end
    }

    /// Adds a piece, or counts it under this name where there is no room for it. True if there was.
    pub fn add(&mut self, what: &'static str, text: &str) -> bool {
        self.add_before(what, text, 0)
    }

    /// The same of what opens something, with room for its end.
    pub fn open(&mut self, what: &'static str, text: &str) -> bool {
        self.add_before(what, text, CLOSING)
    }

    fn add_before(&mut self, what: &'static str, text: &str, closing: usize) -> bool {
        let fits = self.fits(text.len() + closing);
        match fits {
            true => self.text += text,
            false => *self.left_out.entry(what).or_default() += 1,
        }
        fits
    }

    /// Adds pieces between an opening and a closing mark. The first that does not fit ends the list: a later one would
    /// be taken for its neighbour. The others are counted, and the number of them follows in a line of this form.
    pub fn list(
        &mut self,
        (what, open, close): (&'static str, &str, &str),
        pieces: impl Iterator<Item = String>,
        line: impl Fn(String) -> String,
    ) {
        let is_open = self.fits(open.len() + close.len() + CLOSING);
        if is_open {
            self.mark(open);
        }
        let mut hidden = 0;
        for piece in pieces {
            match is_open && hidden == 0 && self.fits(piece.len()) {
                true => self.mark(&piece),
                false => hidden += 1,
            }
        }
        if is_open {
            self.mark(close);
        }
        if hidden > 0 {
            *self.left_out.entry(what).or_default() += hidden;
        }
        if is_open && hidden > 0 {
            self.mark(&line(format!("… and {hidden} more {}", plural(hidden, what))));
        }
    }

    /// The things that were left out, with their numbers, if there are any.
    pub fn left_out(&self) -> Option<String> {
        let list: Vec<String> =
            self.left_out.iter().map(|(what, count)| counted(*count, what)).collect();
        let end = "A report in json has every record.";
        (!list.is_empty())
            .then(|| format!("Left out, for want of room: {}. {end}", list.join(", ")))
    }

    /// The page.
    pub fn into_text(self) -> String {
        self.text
    }
}

//! Framing of the JSON-RPC socket: JSON values one after the other, with or without white space between them.
//!
//! *What it is.* An incremental scanner that finds where a top-level value ends, in one pass over the bytes however they
//! arrive, and parses each complete value once.
//!
//! *Invariants.* Only objects and arrays are values here (answers are never bare numbers). At most [`VALUE_BYTES_MAX`]
//! bytes are kept.
//!
//! *When things fail.* The first error ends the stream: after it the place where the next value begins is unknown.

use serde_json::Value;

/// Largest answer: the bound of SPDK's own answer buffer (32 MiB).
pub const VALUE_BYTES_MAX: usize = 32 * 1024 * 1024;

/// The byte stream is not a sequence of JSON values.
#[derive(Debug, thiserror::Error)]
pub enum FramingError {
    /// A value is longer than [`VALUE_BYTES_MAX`].
    #[error("an answer is longer than {VALUE_BYTES_MAX} bytes")]
    TooLong,
    /// A byte that cannot begin a value.
    #[error("byte {0:#04x} where '{{' or '[' should begin an answer")]
    Start(u8),
    /// The value is not JSON.
    #[error("an answer is not JSON: {0}")]
    Json(#[from] serde_json::Error),
}

/// Cuts a byte stream into JSON values.
#[derive(Debug, Default)]
pub struct Framer {
    buffer: Vec<u8>,
    scanned: usize,
    depth: u32,
    in_string: bool,
    escaped: bool,
}

impl Framer {
    /// A framer with nothing in it.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes bytes as they came.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// The next complete value; `None` when more bytes are needed.
    ///
    /// # Errors
    /// The stream is broken and must be closed.
    pub fn next_value(&mut self) -> Result<Option<Value>, FramingError> {
        self.skip_white_space();
        while self.scanned < self.buffer.len() {
            let byte = self.buffer[self.scanned];
            if self.depth == 0 && !matches!(byte, b'{' | b'[') {
                return Err(FramingError::Start(byte));
            }
            self.scanned += 1;
            if self.step(byte) {
                return self.take().map(Some);
            }
        }
        if self.buffer.len() > VALUE_BYTES_MAX {
            return Err(FramingError::TooLong);
        }
        Ok(None)
    }

    /// Accounts for one byte; true when it ends the value.
    fn step(&mut self, byte: u8) -> bool {
        if self.in_string {
            match byte {
                _ if self.escaped => self.escaped = false,
                b'\\' => self.escaped = true,
                b'"' => self.in_string = false,
                _ => {}
            }
            return false;
        }
        match byte {
            b'"' => self.in_string = true,
            b'{' | b'[' => self.depth += 1,
            b'}' | b']' => {
                self.depth -= 1;
                return self.depth == 0;
            }
            _ => {}
        }
        false
    }

    fn take(&mut self) -> Result<Value, FramingError> {
        let value = serde_json::from_slice(&self.buffer[..self.scanned]);
        self.buffer.drain(..self.scanned);
        self.scanned = 0;
        Ok(value?)
    }

    fn skip_white_space(&mut self) {
        if self.depth == 0 && self.scanned == 0 {
            let blank = self.buffer.iter().take_while(|byte| byte.is_ascii_whitespace()).count();
            self.buffer.drain(..blank);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use serde_json::json;

    fn all(framer: &mut Framer) -> Vec<Value> {
        std::iter::from_fn(|| framer.next_value().unwrap()).collect()
    }

    #[test]
    fn values_are_found_however_the_bytes_arrive() {
        let values = [json!({"a": "}\"]\\", "b": [1, {"c": null}]}), json!([]), json!({}), json!({"ü": "\u{1}\n"})];
        for separator in ["", "\n", " \r\n\t"] {
            let text = values.iter().map(Value::to_string).collect::<Vec<_>>().join(separator);
            for chunk in [1, 2, 3, 7, text.len()] {
                let mut framer = Framer::new();
                let mut seen = Vec::new();
                for part in text.as_bytes().chunks(chunk) {
                    framer.push(part);
                    seen.extend(all(&mut framer));
                }
                assert_eq!(seen, values, "separator {separator:?}, chunks of {chunk}");
            }
        }
    }

    #[test]
    fn an_unfinished_value_waits() {
        let text = json!({"result": ["x", {"y": "z\\"}]}).to_string();
        for cut in 0..text.len() {
            let mut framer = Framer::new();
            framer.push(&text.as_bytes()[..cut]);
            assert!(framer.next_value().unwrap().is_none(), "cut at {cut}");
            framer.push(&text.as_bytes()[cut..]);
            assert!(framer.next_value().unwrap().is_some(), "cut at {cut}");
        }
    }

    #[test]
    fn garbage_ends_the_stream() {
        let mut framer = Framer::new();
        framer.push(b"{}x");
        assert_eq!(framer.next_value().unwrap(), Some(json!({})));
        assert!(matches!(framer.next_value(), Err(FramingError::Start(b'x'))));
        let mut framer = Framer::new();
        framer.push(b"{]");
        assert!(matches!(framer.next_value(), Err(FramingError::Json(_))));
        let mut framer = Framer::new();
        framer.push(b"{1}");
        assert!(matches!(framer.next_value(), Err(FramingError::Json(_))));
    }

    #[test]
    fn an_endless_value_is_refused() {
        let mut framer = Framer::new();
        framer.push(b"[\"");
        framer.push(&vec![b'a'; VALUE_BYTES_MAX]);
        assert!(matches!(framer.next_value(), Err(FramingError::TooLong)));
    }
}

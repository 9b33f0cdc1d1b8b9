//! The live view: a block on the terminal, redrawn in place; what happens scrolls by above it.

use std::io::{self, Stderr, Write};
use std::time::Duration;

use crossterm::{cursor, queue, terminal};
use elasticdl_master::status::Status;

use super::block::{Block, Rates};

/// A block on stderr. The cursor comes back when it is dropped.
pub struct Live {
    out: Stderr,
    rates: Rates,
    shown: Vec<String>,
    colour: bool,
}

impl Live {
    /// Nothing is drawn yet.
    pub fn new() -> Self {
        // https://no-color.org: set and not empty means no colours.
        let colour = std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty());
        Live { out: io::stderr(), rates: Rates::default(), shown: Vec::new(), colour }
    }

    /// Draws the job as it is now.
    pub fn status(&mut self, now: Duration, status: &Status) -> io::Result<()> {
        let (columns, rows) = terminal::size().unwrap_or((80, 24));
        let (width, height) = (usize::from(columns).max(2) - 1, usize::from(rows).max(2) - 1);
        self.rates.observe(now, status);
        let lines = Block { width, height, colour: self.colour }.lines(status, &self.rates);
        self.wipe()?;
        self.draw(lines)
    }

    /// Writes a line above the block.
    pub fn note(&mut self, text: &str) -> io::Result<()> {
        let lines = std::mem::take(&mut self.shown);
        self.wipe_lines(&lines)?;
        write!(self.out, "{}\r\n", text.replace("\n", "\r\n"))?;
        self.draw(lines)
    }

    /// Removes the block and shows the cursor.
    pub fn end(&mut self) -> io::Result<()> {
        self.wipe()?;
        queue!(self.out, cursor::Show)?;
        self.out.flush()
    }

    fn wipe(&mut self) -> io::Result<()> {
        let lines = std::mem::take(&mut self.shown);
        self.wipe_lines(&lines)
    }

    fn wipe_lines(&mut self, lines: &[String]) -> io::Result<()> {
        // A terminal that was made narrower meanwhile has broken the lines it shows.
        let columns = terminal::size().map_or(usize::MAX, |(columns, _)| usize::from(columns).max(1));
        let rows: usize = lines.iter().map(|line| visible_width(line).div_ceil(columns).max(1)).sum();
        queue!(self.out, terminal::BeginSynchronizedUpdate, cursor::MoveToColumn(0))?;
        if rows > 0 {
            queue!(self.out, cursor::MoveUp(rows.min(usize::from(u16::MAX)) as u16))?;
        }
        queue!(self.out, terminal::Clear(terminal::ClearType::FromCursorDown))
    }

    fn draw(&mut self, lines: Vec<String>) -> io::Result<()> {
        queue!(self.out, cursor::Hide)?;
        for line in &lines {
            write!(self.out, "{line}\r\n")?;
        }
        queue!(self.out, terminal::EndSynchronizedUpdate)?;
        self.shown = lines;
        self.out.flush()
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        let _ = queue!(self.out, terminal::EndSynchronizedUpdate, cursor::Show);
        let _ = self.out.flush();
    }
}

/// Columns that a line takes: its characters without the colours between them.
fn visible_width(line: &str) -> usize {
    let mut width = 0;
    let mut in_escape = false;
    for c in line.chars() {
        match c {
            '\x1b' => in_escape = true,
            'm' if in_escape => in_escape = false,
            _ => width += usize::from(!in_escape),
        }
    }
    width
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_take_no_room() {
        assert_eq!(visible_width("\x1b[38;5;10m███\x1b[39m mm"), 6);
    }
}

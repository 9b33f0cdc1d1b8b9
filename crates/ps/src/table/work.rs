//! What is done with a row that was found. A trait and not closures, and loops and not `for_each`: all of it has to
//! become part of what is compiled for this processor's vectors, and only a method can ask for that.

use super::AHEAD;
use super::slabs::Slabs;
use crate::optimizer::Rule;

/// Done with row after row, in the order of their ids.
pub(super) trait Work {
    /// Whether it changes rows.
    const CHANGES: bool;
    /// Whether it looks at what a new row is born as.
    const NEEDS_BIRTH: bool = true;

    /// The row `number`, of the id at `place`.
    fn on(&mut self, rows: &mut Slabs, place: usize, number: u32);

    /// Rows of the ids from `place` on, one after the other. Of each the first `floats` are asked for some time before.
    #[inline(always)]
    fn on_all(&mut self, rows: &mut Slabs, place: usize, numbers: &[u32], floats: usize) {
        let (first, ahead) = numbers.split_at(numbers.len().min(rows_ahead(floats)));
        for number in first {
            rows.ask_for(*number, floats);
        }
        let mut numbers = (place..).zip(numbers);
        for (next, (place, number)) in ahead.iter().zip(&mut numbers) {
            rows.ask_for(*next, floats);
            self.on(rows, place, *number);
        }
        for (place, number) in numbers {
            self.on(rows, place, *number);
        }
    }
}

/// How many rows are asked for before they are used: as many cache lines as entries, but never only a few rows.
#[inline(always)]
fn rows_ahead(floats: usize) -> usize {
    const LINE_FLOATS: usize = 16;
    const LEAST: usize = 16;
    (AHEAD / floats.div_ceil(LINE_FLOATS).max(1)).max(LEAST)
}

/// Copies weights; `WIDTH` of each row, if it is not 0: most rows have one of few widths (a power of two, or one weight
/// more), and a copy that knows it is a few instructions.
pub(super) struct Copying<'a, const WIDTH: usize> {
    pub width: usize,
    /// Those of all ids, one after the other.
    pub out: &'a mut [f32],
}

impl<const WIDTH: usize> Work for Copying<'_, WIDTH> {
    const CHANGES: bool = false;

    #[inline(always)]
    fn on(&mut self, rows: &mut Slabs, place: usize, number: u32) {
        self.on_all(rows, place, &[number], self.width);
    }

    /// The same with less to be checked row by row.
    #[inline(always)]
    fn on_all(&mut self, rows: &mut Slabs, place: usize, numbers: &[u32], _: usize) {
        let width = if WIDTH == 0 { self.width } else { WIDTH };
        let (first, ahead) = numbers.split_at(numbers.len().min(rows_ahead(width)));
        for number in first {
            rows.ask_for(*number, width);
        }
        let mut copies = numbers.iter().zip(self.out[place * width..].chunks_exact_mut(width));
        for (next, (number, out)) in ahead.iter().zip(&mut copies) {
            rows.ask_for(*next, width);
            copy(&rows.row(*number)[..width], out);
        }
        for (number, out) in copies {
            copy(&rows.row(*number)[..width], out);
        }
    }
}

/// Copies a short row: a loop that is laid out in place beats a call for so few bytes.
#[inline(always)]
pub(super) fn copy(from: &[f32], to: &mut [f32]) {
    let (mut from8, mut to8) = (from.chunks_exact(8), to.chunks_exact_mut(8));
    for (from, to) in (&mut from8).zip(&mut to8) {
        to.copy_from_slice(from);
    }
    for (from, to) in from8.remainder().iter().zip(to8.into_remainder()) {
        *to = *from;
    }
}

/// Replaces weights and slots.
pub(super) struct Replacing<'a> {
    /// Floats of a row.
    pub floats: usize,
    /// Those of all ids, one after the other.
    pub rows: &'a [f32],
}

impl Work for Replacing<'_> {
    const CHANGES: bool = true;
    const NEEDS_BIRTH: bool = false;

    #[inline(always)]
    fn on(&mut self, rows: &mut Slabs, place: usize, number: u32) {
        copy(&self.rows[place * self.floats..][..self.floats], rows.row_mut(number));
    }
}

/// Moves weights against their gradients.
pub(super) struct Moving<'a, R> {
    pub width: usize,
    pub rule: &'a R,
    /// What the learning rate is multiplied by.
    pub factor: f32,
    /// Those of all ids, one after the other.
    pub gradients: &'a [f32],
}

impl<R: Rule> Work for Moving<'_, R> {
    const CHANGES: bool = true;

    #[inline(always)]
    fn on(&mut self, rows: &mut Slabs, place: usize, number: u32) {
        let (weights, slots) = rows.row_mut(number).split_at_mut(self.width);
        self.rule.apply(weights, slots, &self.gradients[place * self.width..][..self.width], self.factor);
    }
}

/// The same where so much of a weight is added to its gradient.
pub(super) struct Decaying<'a, R> {
    pub moving: Moving<'a, R>,
    pub l2: f32,
    /// As wide as a row.
    pub sum: Vec<f32>,
}

impl<R: Rule> Work for Decaying<'_, R> {
    const CHANGES: bool = true;

    #[inline(always)]
    fn on(&mut self, rows: &mut Slabs, place: usize, number: u32) {
        let Moving { width, rule, factor, gradients } = self.moving;
        let (weights, slots) = rows.row_mut(number).split_at_mut(width);
        for ((sum, w), g) in self.sum.iter_mut().zip(&*weights).zip(&gradients[place * width..][..width]) {
            *sum = g + self.l2 * w;
        }
        rule.apply(weights, slots, &self.sum, factor);
    }
}

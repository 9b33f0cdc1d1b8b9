//! What a program says about itself in its ELF header: for which processor it is, and whether something has
//! to load libraries for it.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use anyhow::Context;

use crate::fault::Fault;

/// A program that an image can start.
#[derive(Debug, PartialEq, Eq)]
pub struct Program {
    /// The processor, as images name it.
    pub architecture: &'static str,
    /// The loader that it asks for; none where it is static.
    pub interpreter: Option<PathBuf>,
}

/// Type of the program header that names the loader.
const PT_INTERP: u32 = 3;

impl Program {
    /// Reads a file's header.
    pub fn read(path: &Path) -> anyhow::Result<Program> {
        let bytes = fs::read(path).with_context(|| format!("reading the program {}", path.display()))?;
        Program::parse(&bytes).map_err(|why| {
            Fault::user(format!("{} cannot be the program of an image: {why}", path.display()))
                .hint("--binary takes an elasticdl program built for Linux")
                .into()
        })
    }

    fn parse(bytes: &[u8]) -> Result<Program, String> {
        const CUT: &str = "it is cut off";
        if !bytes.starts_with(b"\x7fELF") {
            return Err("it is no ELF file".into());
        }
        // Class 2 is 64 bits, data 1 is little-endian: all that Linux clusters have today.
        if bytes.get(4..6) != Some(&[2, 1]) {
            return Err("it is not for a 64-bit little-endian processor".into());
        }
        let architecture = match number::<2>(bytes, 18).ok_or(CUT)? {
            62 => "amd64",
            183 => "arm64",
            243 => "riscv64",
            other => return Err(format!("it is for a processor of ELF type {other}")),
        };
        if number::<8>(bytes, 24).ok_or(CUT)? == 0 {
            return Err("it has nowhere to start: is it a library?".into());
        }
        let table = number::<8>(bytes, 32).ok_or(CUT)?;
        let (size, count) = (number::<2>(bytes, 54).ok_or(CUT)?, number::<2>(bytes, 56).ok_or(CUT)?);
        for i in 0..count {
            let header = usize::try_from(table + i * size).map_err(|_| CUT)?;
            if number::<4>(bytes, header).ok_or(CUT)? == u64::from(PT_INTERP) {
                let from = number::<8>(bytes, header + 8).ok_or(CUT)?;
                let length = number::<8>(bytes, header + 32).ok_or(CUT)?;
                let name = slice(bytes, from, length).ok_or(CUT)?;
                let name = name.split(|&byte| byte == 0).next().unwrap_or_default();
                return Ok(Program { architecture, interpreter: Some(OsStr::from_bytes(name).into()) });
            }
        }
        Ok(Program { architecture, interpreter: None })
    }
}

/// The little-endian number of `N` bytes at a place.
fn number<const N: usize>(bytes: &[u8], at: usize) -> Option<u64> {
    let part = bytes.get(at..at.checked_add(N)?)?;
    Some(part.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte)))
}

fn slice(bytes: &[u8], from: u64, length: u64) -> Option<&[u8]> {
    let from = usize::try_from(from).ok()?;
    bytes.get(from..from.checked_add(usize::try_from(length).ok()?)?)
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// The smallest ELF file that counts as a program: a header, one program header, a loader's name.
    pub fn program(machine: u16, interpreter: Option<&str>) -> Vec<u8> {
        let mut bytes = vec![0; 120];
        bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
        bytes[18..20].copy_from_slice(&machine.to_le_bytes());
        bytes[24] = 1;
        bytes[32] = 64;
        bytes[54] = 56;
        bytes[56] = 1;
        if let Some(name) = interpreter {
            bytes[64] = PT_INTERP as u8;
            bytes[72] = 120;
            bytes[96] = name.len() as u8 + 1;
            bytes.extend_from_slice(name.as_bytes());
            bytes.push(0);
        }
        bytes
    }

    #[test]
    fn a_loader_is_found_where_there_is_one() {
        let dynamic = Program::parse(&program(62, Some("/lib64/ld.so"))).unwrap();
        assert_eq!(dynamic, Program { architecture: "amd64", interpreter: Some("/lib64/ld.so".into()) });
        let fixed = Program::parse(&program(183, None)).unwrap();
        assert_eq!(fixed, Program { architecture: "arm64", interpreter: None });
    }

    #[test]
    fn files_that_are_no_programs_are_told_apart() {
        let why = |bytes: &[u8]| Program::parse(bytes).unwrap_err();
        assert_eq!(why(b"#!/bin/sh"), "it is no ELF file");
        assert_eq!(why(&program(8, None)), "it is for a processor of ELF type 8");
        let mut library = program(62, None);
        library[24] = 0;
        assert_eq!(why(&library), "it has nowhere to start: is it a library?");
        let mut narrow = program(62, None);
        narrow[4] = 1;
        assert_eq!(why(&narrow), "it is not for a 64-bit little-endian processor");
    }

    #[test]
    fn a_file_that_is_cut_off_anywhere_is_an_error_and_no_panic() {
        let whole = program(62, Some("/lib64/ld.so"));
        for length in 4..whole.len() {
            assert!(Program::parse(&whole[..length]).is_err(), "{length} bytes");
        }
    }
}

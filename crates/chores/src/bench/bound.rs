//! What the machine's arithmetic allows: SGEMM of the model's size, one thread per core.
//!
//! One thread per half batch beats two threads inside one GEMM here, so that is the bound to be held against.
#![expect(clippy::disallowed_methods, reason = "a benchmark reads the clock")]
#![expect(unsafe_code, reason = "gemm's only entry point takes pointers")]

use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

/// A hidden layer of half a batch.
const M: usize = 2048;
const N: usize = 400;
const K: usize = 400;
const WARM_UP: Duration = Duration::from_millis(300);
const MEASURED: Duration = Duration::from_millis(1500);

/// GFLOP/s of all threads together.
pub fn sgemm_gflops(threads: u32) -> f64 {
    let start = Barrier::new(threads as usize);
    thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(|| one_thread(&start))).collect();
        running.into_iter().map(|thread| thread.join().expect("a GEMM does not panic")).sum()
    })
}

fn one_thread(start: &Barrier) -> f64 {
    let left: Vec<f32> = (0..M * K).map(|i| (i % 7) as f32 - 3.0).collect();
    let right: Vec<f32> = (0..K * N).map(|i| (i % 5) as f32 - 2.0).collect();
    let mut product = vec![0.0_f32; M * N];
    start.wait();
    let warm = Instant::now();
    while warm.elapsed() < WARM_UP {
        multiply(&left, &right, &mut product);
    }
    let measured = Instant::now();
    let mut count = 0_u32;
    while measured.elapsed() < MEASURED {
        multiply(&left, &right, &mut product);
        count += 1;
    }
    let flops = 2.0 * (M * N * K) as f64 * f64::from(count);
    std::hint::black_box(&product);
    flops / measured.elapsed().as_secs_f64() / 1e9
}

/// `product = left * right`, all row-major.
fn multiply(left: &[f32], right: &[f32], product: &mut [f32]) {
    assert!(left.len() == M * K && right.len() == K * N && product.len() == M * N);
    // SAFETY: the lengths asserted above hold every element the strides reach, and `product` is borrowed
    // mutably, so it overlaps neither factor.
    unsafe {
        gemm::gemm(
            M,
            N,
            K,
            product.as_mut_ptr(),
            1,
            N as isize,
            false,
            left.as_ptr(),
            1,
            K as isize,
            right.as_ptr(),
            1,
            N as isize,
            0.0_f32,
            1.0_f32,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn multiply_gives_the_row_major_product() {
        let left: Vec<f32> = (0..M * K).map(|i| (i % 7) as f32).collect();
        let right: Vec<f32> = (0..K * N).map(|i| (i % 5) as f32).collect();
        let mut product = vec![f32::NAN; M * N];
        multiply(&left, &right, &mut product);
        let (row, column) = (1234, 321);
        let expected: f32 = (0..K).map(|k| left[row * K + k] * right[k * N + column]).sum();
        assert_eq!(product[row * N + column], expected);
    }
}

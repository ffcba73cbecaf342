"""The argument lists that people start Megatron-LM with, word for word, "=" and repetitions included. Where a chart fills in
a name, what it is by default stands here."""

COMMON = """--lr 1e-5 --min-lr 1e-6 --lr-decay-iters 320000 --lr-decay-style cosine --weight-decay 1.0e-1 --clip-grad 1.0
  --pipeline-model-parallel-size 1 --context-parallel-size 1 --seq-length 2048 --train-iters 20
  --no-async-tensor-model-parallel-allreduce --bf16 --no-masked-softmax-fusion --tokenizer-type HuggingFaceTokenizer
  --tokenizer-model /local_resources/tokenizer --save-interval 20 --eval-interval 10 --ckpt-format torch
  --save /local_resources/checkpoints --dataloader-type cyclic --num-workers 8 --log-interval 1 --log-throughput
  --no-save-optim --no-save-rng --eval-iters 10 --tensorboard-dir /local_resources/experiment/
  --no-gradient-accumulation-fusion --distributed-timeout-minutes 120 --use-distributed-optimizer --overlap-param-gather
  --overlap-grad-reduce --optimizer adam --exit-on-missing-checkpoint --no-load-optim --use-checkpoint-args --no-load-rng"""
AGAIN = "--ckpt-format torch"  # some say it twice
PRETRAINED = """--data-path /local_resources/data/fineweb-edu-train_text_document --load /local_resources/basemodel"""
LLAMA = """--untie-embeddings-and-output-weights --position-embedding-type rope --disable-bias-linear --swiglu
  --init-method-std 0.02 --attention-dropout 0.0 --hidden-dropout 0.0 --normalization RMSNorm --group-query-attention
  --num-query-groups 8 --max-position-embeddings 128000"""
CHARTS = {
    "values": f"{COMMON} {AGAIN} {PRETRAINED} --tensor-model-parallel-size 1 --micro-batch-size 2 --global-batch-size 16 "
              "--use-flash-attn",
    "llama-8b-2x2-4ddp": f"{COMMON} {AGAIN} {PRETRAINED} --tensor-model-parallel-size 1 --micro-batch-size 2 "
                         "--global-batch-size 16 --use-flash-attn",
    "llama-8b-16ddp, tutorial 03": f"{COMMON} {AGAIN} {PRETRAINED} --tensor-model-parallel-size 1 --micro-batch-size 11 "
                                   "--global-batch-size 704 --use-flash-attn",
    "llama-70b-2ddp, tutorial 04": f"{COMMON} {PRETRAINED} --tensor-model-parallel-size 8 --sequence-parallel "
                                   "--micro-batch-size 11 --global-batch-size 176 --recompute-activations "
                                   "--data-cache-path /local_resources/data/cache",
    "llama-8b-2x2-4ddp-no-cpt-mock-data": f"{COMMON} {LLAMA} --mock-data --tensor-model-parallel-size 1 "
                                          "--micro-batch-size 3 --global-batch-size 192 --use-flash-attn --num-layers 32 "
                                          "--hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32",
    "llama-70b-1x8-8tp-no-cpt-mock-data": f"{COMMON} {LLAMA} --mock-data --tensor-model-parallel-size 8 "
                                          "--sequence-parallel --micro-batch-size 3 --global-batch-size 192 "
                                          "--lr-warmup-fraction .001 --adam-beta1 0.9 --adam-beta2 0.95 --use-flash-attn "
                                          "--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 "
                                          "--num-attention-heads 64",
}
# AWS's test cases for Megatron-LM (github.com/aws-samples/awsome-distributed-training): EKS's PyTorchJob, GPT-3 7.5B, with "=" ...
EKS = """--tensor-model-parallel-size=8 --pipeline-model-parallel-size=1 --num-layers=36 --hidden-size=4096
  --num-attention-heads=32 --seq-length=2048 --max-position-embeddings=2048 --micro-batch-size=1 --global-batch-size=288
  --train-samples=146484375 --lr-decay-samples=126953125 --lr-warmup-samples=183105 --lr=6.0e-05 --min-lr=6.0e-06
  --lr-decay-style=cosine --log-interval=1 --eval-iters=40 --eval-interval=1000 --data-path=/fsx/gpt2/my-gpt2_text_document
  --vocab-file=/fsx/gpt2/gpt2-vocab.json --merge-file=/fsx/gpt2/gpt2-merges.txt --split=98,2,0 --clip-grad=1.0 --weight-decay=0.1
  --adam-beta1=0.9 --adam-beta2=0.95 --init-method-std=0.006 --fp16 --recompute-activations"""
# ... under Slurm with enroot the same model, over four and two GPUs, and Llama 2 70B.
AWS_SLURM = """--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --num-layers 36 --hidden-size 4096
  --num-attention-heads 32 --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 288
  --train-samples 146484375 --lr-decay-samples 126953125 --lr-warmup-samples 183105 --lr 6.0e-5 --min-lr 6.0e-6
  --lr-decay-style cosine --log-interval 1 --eval-iters 40 --eval-interval 1000 --data-path /fsx/gpt2/my-gpt2_text_document
  --vocab-file /fsx/gpt2/gpt2-vocab.json --merge-file /fsx/gpt2/gpt2-merges.txt --split 98,2,0 --clip-grad 1.0
  --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --fp16 --recompute-activations"""
AWS_LLAMA2 = """--num-layers 80 --hidden-size 8192 --num-attention-heads 64 --group-query-attention --num-query-groups 8
  --tensor-model-parallel-size 4 --pipeline-model-parallel-size 4 --sequence-parallel --use-distributed-optimizer
  --overlap-grad-reduce --overlap-param-gather --untie-embeddings-and-output-weights --position-embedding-type rope
  --no-position-embedding --normalization RMSNorm --swiglu --no-masked-softmax-fusion --no-rope-fusion --use-flash-attn
  --transformer-impl transformer_engine --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1
  --global-batch-size 2048 --train-iters 5 --split 100,0,0 --use-mcore-models --log-throughput --lr 6.0e-5 --min-lr 6.0e-6
  --lr-decay-style cosine --log-interval 1 --eval-iters 0 --data-path /fsx/llama2/my-llama2_text_document
  --tokenizer-type Llama2Tokenizer --tokenizer-model /fsx/llama2/tokenizer.model --clip-grad 1.0 --weight-decay 0.1
  --adam-beta1 0.9 --adam-beta2 0.95 --wandb-exp-name llama2-megatron-lm --wandb-project megatron-lm
  --init-method-std 0.006 --fp16"""
# Megatron-LM's examples/llama/train_llama3_8b_h100_fp8.sh, which quotes the split twice, and what it adds for FP8.
SLURM = """--use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
  --group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length 8192 --max-position-embeddings 8192
  --position-embedding-type rope --rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0 --hidden-dropout 0.0
  --swiglu --init-method-std 0.0134 --attention-backend fused --apply-layernorm-1p --untie-embeddings-and-output-weights
  --disable-bias-linear --micro-batch-size 1 --global-batch-size 128 --train-samples 1953125000 --lr-decay-samples 1949218748
  --lr-warmup-samples 3906252 --lr 0.00015 --min-lr 0.00001 --decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5
  --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --bf16 --grad-reduce-in-bf16
  --cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc --empty-unused-memory-level 1
  --exit-duration-in-mins 235 --tensor-model-parallel-size 1 --context-parallel-size 1
  --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --mock-data
  --tokenizer-type NullTokenizer --vocab-size 128256 --data-cache-path /cache --tiktoken-pattern v2 --split '99,1,0'
  --no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1 --log-interval 1 --eval-iters 32
  --eval-interval 100 --save-interval 1000 --log-throughput --profile --profile-step-start 4 --profile-step-end 6
  --ckpt-format torch_dist --distributed-timeout-minutes 60 --save /ckpt --load /ckpt --tensorboard-dir /tb"""
FP8 = "--fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-param-gather"
